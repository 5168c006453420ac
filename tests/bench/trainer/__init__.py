"""The speed of the trainer compared with the loops of its source documents: ``python -m tests.bench.trainer``."""
