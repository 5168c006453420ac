"""``spec.history``: the records of ended jobs in a store."""
