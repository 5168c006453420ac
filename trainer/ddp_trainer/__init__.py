"""The trainer: ``torchrun -m ddp_trainer --preset NAME``, on one process or on many."""
