"""``spec.tracking``: one run in experiment trackers for all attempts."""
