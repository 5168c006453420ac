"""``checkpoint.url``: the checkpoint folder in a store."""
