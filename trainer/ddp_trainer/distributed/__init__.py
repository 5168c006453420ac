"""Ranks, process groups, DistributedDataParallel, and stopping all ranks after the same step."""
