"""Code inside a rank's process: the shim, tracebacks, experiment tracking."""
