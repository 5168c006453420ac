"""Build the Kubernetes objects of a job from the typed resource. Pure: no I/O, no clock."""
