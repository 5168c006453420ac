"""Pure decisions: what was observed, what it means, what to do. No I/O, no client; ``now`` is an argument."""
