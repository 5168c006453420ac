"""Output for users: why a job waits or failed, the table of running jobs, and text that is safe on a terminal."""
