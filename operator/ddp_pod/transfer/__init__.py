"""Transfers: inputs, code, the copies of the checkpoint folder, and copies of the state in memory."""
