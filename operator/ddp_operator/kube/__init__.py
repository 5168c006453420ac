"""The cluster behind an API server; the only package that talks to one."""
