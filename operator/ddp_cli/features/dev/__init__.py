"""`ddp dev`, `rerun` and `release`: pods that stay, and run changed code within seconds."""
