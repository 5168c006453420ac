"""The launcher, which runs in pods: Python 3.10 and the standard library only. See ``bootstrap.py``."""
