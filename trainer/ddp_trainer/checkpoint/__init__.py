"""Checkpoints: the store on disk, the copy that is written, and the fence between attempts."""
