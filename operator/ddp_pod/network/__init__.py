"""The network: the check before the first step, its measurements, and NCCL's log."""
