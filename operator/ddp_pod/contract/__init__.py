"""What pod and operator share: names, exit codes, the failure record. Python 3.10 and the standard library only."""
