"""Training jobs from Python, in a cluster or on this machine: ``from ddp_operator import Client``.

The commands of `ddp` are written on it. Nothing is imported here: `ddp_operator` names what is for users, and loads it
when it is used.
"""
