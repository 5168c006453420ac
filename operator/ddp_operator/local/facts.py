"""Where and with what a run is made, for its report: the machine, versions, the commit, variables of libraries."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ddp_operator import __version__

_GIT_SECONDS: Final = 2.0
_TELLING: Final = re.compile(r"(CUDA|GLOO|KMP|MKL|NCCL|OMP|PYTORCH|TORCH|TORCHINDUCTOR|TRITON)_")
_SECRET: Final = re.compile(r"KEY|PASS|SECRET|TOKEN")


def describe_environment(resource: Mapping[str, Any], folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the facts by name. ``folder``: the working directory, whose commit is told."""
    facts = {
        "host": f"{platform.node()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "directory": str(folder),
        "commit": describe_commit(folder),
        "versions": ", ".join(
            (f"ddp {__version__}", f"Python {platform.python_version()}", *_versions("torch", "numpy"))
        ),
    }
    containers = resource["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: str(entry.get("value", "")) for entry in containers[0].get("env") or ()}
    told = {name: value for name, value in sorted({**environ, **given}.items()) if _TELLING.match(name)}
    facts["variables"] = " ".join(f"{name}={value}" for name, value in told.items() if not _SECRET.search(name))
    return {name: value for name, value in facts.items() if value}


def describe_commit(folder: Path) -> str:
    """Return the commit of a folder and whether files differ from it; empty where there is none, or no git."""
    commit = _git(folder, "log", "-1", "--format=%h %s")
    if not commit:
        return ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit + (" (with uncommitted changes)" if changed else "")


def _git(folder: Path, *words: str) -> str:
    try:
        command = ["git", "-C", str(folder), "--no-optional-locks", *words]
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=_GIT_SECONDS
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _versions(*packages: str) -> list[str]:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found
