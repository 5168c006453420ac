"""What a run reports: metrics, progress lines, timings, the CSV. Users import :mod:`ddp_trainer.exporter`."""
