"""Progress: the ranks' output and metrics, and the pod's report."""
