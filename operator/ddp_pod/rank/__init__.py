"""Code inside a rank's process: the shim, the counters of steps, tracebacks."""
