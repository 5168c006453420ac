"""`ddp dev`: a pod is held between runs."""
