"""``checkpoint.memory``: copies of the state in shared memory."""
