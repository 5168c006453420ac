"""Pure builders: from the typed resource to the Kubernetes objects the operator creates. No I/O, no clock."""
