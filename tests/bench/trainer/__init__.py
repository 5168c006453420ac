"""How fast the trainer is beside the loops of the documents it grew out of: ``python -m tests.bench.trainer``."""
