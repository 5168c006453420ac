"""Where the programs of Kubernetes are that tests start."""

from __future__ import annotations

import os
import shutil


def find_binary(name: str) -> str | None:
    """Return the path of a Kubernetes binary, or None."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    result = shutil.which(name, path=folder) if folder else None
    return result or (shutil.which(name) if name == "etcd" else None)
