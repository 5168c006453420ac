"""Failures: the typed record that a pod leaves, and its wording for people. The table is the launcher's."""
