"""Training jobs from Python, in a cluster or on this machine: ``from ddp_operator import Client``.

The commands of `ddp` use it. This module imports nothing: `ddp_operator` lists the public names and imports each on
first use.
"""
