"""``spec.inputs``: data that a pod without GPUs fetches first."""
