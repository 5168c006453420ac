"""Progress: the ranks' output and metrics, and the pod's metrics page."""
