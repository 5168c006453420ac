"""The network: peers that this pod cannot reach."""
