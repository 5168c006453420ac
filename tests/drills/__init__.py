"""Fault drills: real jobs that are broken on purpose, and have to end as if nothing had happened. `make drills`."""
