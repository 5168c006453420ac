"""Failures: examine how an agent or a rank ended, and write the termination message."""
