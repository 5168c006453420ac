"""``spec.preflight``: checks of the network before the ranks start."""
