"""Read what others have written: objects of the cluster, Events and reports of pods become the records of decisions."""
