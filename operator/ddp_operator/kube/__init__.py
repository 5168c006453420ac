"""The cluster behind an API server. No other package of the operator's process makes calls to it."""
