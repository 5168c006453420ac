"""Training scripts, each as a user would have it in its folder."""
