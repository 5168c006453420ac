"""Reports of a run: metrics, progress lines, timings, the CSV file. Users import :mod:`ddp_sdk.exporter`."""
