"""This machine: its GPUs and which pod gets which, and what the report tells of it. Imports no torch."""

import functools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ddp_operator import __version__
from ddp_operator.code.archive import ask_git

_GIT_SECONDS: Final = 2.0
_TELLING: Final = re.compile(r"(CUDA|GLOO|KMP|MKL|NCCL|OMP|PYTORCH|TORCH|TORCHINDUCTOR|TRITON)_")
_SECRET: Final = re.compile(r"KEY|PASS|SECRET|TOKEN")


def describe_environment(resource: Mapping[str, Any], folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the facts by name. ``folder``: the working directory, whose commit is told."""
    versions = (f"ddp {__version__}", f"Python {platform.python_version()}", *_versions("torch", "numpy"))
    facts = {
        "host": f"{platform.node()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "directory": str(folder),
        "commit": describe_commit(folder),
        "versions": ", ".join(versions),
    }
    code = resource["spec"].get("code")
    if code:
        commit = (
            f"commit {code['commit']}{' with changes' if code.get('dirty') else ''}, " if code.get("commit") else ""
        )
        facts["code"] = f"{commit}digest {code['digest']}"
    containers = resource["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: str(entry.get("value", "")) for entry in containers[0].get("env") or ()}
    told = {name: value for name, value in sorted({**environ, **given}.items()) if _TELLING.match(name)}
    facts["variables"] = " ".join(f"{name}={value}" for name, value in told.items() if not _SECRET.search(name))
    return {name: value for name, value in facts.items() if value}


def describe_commit(folder: Path) -> str:
    """Return the commit of a folder and whether files differ from it; empty where there is none, or no git."""
    commit = ask_git(folder, "log", "-1", "--format=%h %s", seconds=_GIT_SECONDS)
    if not commit:
        return ""
    changed = ask_git(folder, "status", "--porcelain", "--untracked-files=no", seconds=_GIT_SECONDS)
    return commit + (" (with uncommitted changes)" if changed else "")


def _versions(*packages: str) -> list[str]:
    found = []
    for name in packages:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def find_gpus(
    environ: Mapping[str, str], *, devices: Path = Path("/dev"), amd_nodes: Path = _AMD_NODES
) -> tuple[str, ...]:
    """Return the ids of the GPUs that processes of this user may use, as CUDA_VISIBLE_DEVICES names them.

    NVIDIA's, or AMD's where there are none of these; HIP reads that variable too.
    """
    if VISIBLE_DEVICES in environ:
        return tuple(word for part in environ[VISIBLE_DEVICES].split(",") if (word := part.strip()) not in ("", "-1"))
    found = _ask_driver()
    if found is None:
        found = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    return tuple(map(str, range(found or sum(map(_is_gpu, amd_nodes.glob("*/gpu_id"))))))


def _is_gpu(path: Path) -> bool:
    """Tell whether a node of AMD's driver is a GPU that may be used: of CPUs the id is 0."""
    try:
        return int(path.read_text()) != 0
    except (OSError, ValueError):
        return False


@functools.cache
def _ask_driver() -> int | None:
    """Count with nvidia-smi, once a process; None where that cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        # The driver can take seconds to wake up, and hangs where it is broken.
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if answer.returncode else sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


class GpuPool:
    """Hands out GPUs so that no two pods share one."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = tuple(ids)
        self._free = list(ids)
        self._held: dict[str, list[str]] = {}

    def take(self, holder: str, count: int) -> list[str] | None:
        """Give ``count`` GPUs to the holder, or None while there are too few."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        self._held[holder] = taken
        return taken

    def give_back(self, holder: str) -> None:
        """Take back what the holder has; the next one gets the first that are free, in the machine's order."""
        free = {*self._free, *self._held.pop(holder, [])}
        self._free = [one for one in self._ids if one in free]
