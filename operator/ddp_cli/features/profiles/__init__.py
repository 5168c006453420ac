"""`ddp profile`."""
