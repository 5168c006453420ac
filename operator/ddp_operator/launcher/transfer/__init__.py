"""Data that travels: inputs, code, and the copies of the checkpoint folder."""
