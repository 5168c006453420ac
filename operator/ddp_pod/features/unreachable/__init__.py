"""Peers that this pod cannot reach: pod 0 before training, and peers that stop acknowledging data."""
