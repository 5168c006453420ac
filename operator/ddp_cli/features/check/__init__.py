"""`ddp check`: bounded runs of a copy of the user's folder, and the verdicts on what their ranks recorded."""
