"""Fault drills: real jobs with injected faults, which must reach the same final state as without. `make drills`."""
