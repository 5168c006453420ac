"""Pure decisions: from an observation to a status and actions. No I/O, no client; ``now`` is an argument."""
