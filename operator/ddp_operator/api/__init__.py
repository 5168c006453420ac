"""The custom resource: typed spec and status, the CRD made from them, and parsing with errors that name a field."""
