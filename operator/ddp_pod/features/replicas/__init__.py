"""Whether ranks hold equal parameters and train on different batches: the launchers compare samples of all ranks.

The samples share the memory of the step counters: a launcher reads them without the rank's cooperation.
"""
