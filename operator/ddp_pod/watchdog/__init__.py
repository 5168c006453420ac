"""The watchdog: detect a hang, agree on it with the peers, and collect stacks."""
