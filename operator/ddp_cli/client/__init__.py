"""Training jobs from Python, in a cluster or on this machine: ``from ddp_cli import Client``.

The commands of `ddp` use it. This module imports nothing: `ddp_cli` lists the public names and imports each on first
use.
"""
