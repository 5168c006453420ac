"""Facts of the Kubernetes API that every side needs: one helper for each."""
