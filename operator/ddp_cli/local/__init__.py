"""The cluster behind ``ddp run``: this machine, where a Job's pods are processes."""
