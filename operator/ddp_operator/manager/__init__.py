"""The operator's process: Kopf's handlers, leader election, the work loop, and the health and metrics endpoints."""
