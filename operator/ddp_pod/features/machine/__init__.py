"""Facts about the machine of the ranks, for the reasons of slow ones (docs/troubleshooting.md)."""
