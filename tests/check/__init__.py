"""`ddp check` on whole scripts: faults planted alone, and scripts without a fault."""
