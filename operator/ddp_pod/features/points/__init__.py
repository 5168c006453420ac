"""The numbers of rank 0 over time, which pod 0 keeps for curves (docs/ui.md)."""
