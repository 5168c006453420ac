"""This machine: its GPUs, their assignment to pods, and its description for the report. Imports no torch."""

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ddp_cli.local.git import ask_git
from ddp_operator._version import __version__
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.template import resolve_template

_GIT_SECONDS: Final = 2.0
_PYTHON_SECONDS: Final = 30.0
# Run in the current folder, which decides what a shim starts; no module of it hides the library's.
_PROBE: Final = """\
import sys
sys.path[:] = filter(None, sys.path)
import importlib.util
if importlib.util.find_spec("torch") is None:
    sys.exit(1)
print(sys.executable)
"""
_RELEVANT: Final = re.compile(r"(CUDA|GLOO|KMP|MKL|NCCL|OMP|PYTORCH|TORCH|TORCHINDUCTOR|TRITON)_")
_SECRET: Final = re.compile(r"KEY|PASS|SECRET|TOKEN")

# Pods communicate over the loopback interface, which no manifest can change; gloo would use the host name's address.
LOOPBACK_VARIABLES: Final = dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "TP_SOCKET_IFNAME"),
    "lo" if sys.platform == "linux" else "lo0",
)


ENV_PYTHON: Final = "DDP_PYTHON"
"""The Python of the pods, as set by `ddp run --python`."""


def find_interpreter(word: str, environ: Mapping[str, str]) -> str:
    """Return the interpreter on this machine for the Python in a command.

    The path of a program on this machine is kept. Any other, such as ``python`` or a path in the image, is the one that
    ``choose_python`` returns.
    """
    path = os.path.abspath(word)
    is_path = os.path.basename(word) != word
    return path if is_path and _is_program(path) else choose_python(environ)


def choose_python(environ: Mapping[str, str]) -> str:
    """Return the Python that the environment names, else the first of this machine's that has PyTorch, else the first.

    Those are of the active environment, of the project's ``.venv``, of `ddp` itself, and in PATH.
    """
    named = environ.get(ENV_PYTHON)
    if named:
        return os.path.abspath(named)
    return _choose_with_torch(tuple(_list_interpreters(environ)))


def _list_interpreters(environ: Mapping[str, str]) -> Iterator[str]:
    own = os.path.realpath(sys.prefix)
    active = [environ[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environ.get(name)]
    for environment in (*active, *(str(folder / ".venv") for folder in _list_project_folders())):
        program = os.path.join(environment, "bin", "python")
        if os.path.realpath(environment) == own:
            yield sys.executable
        elif _is_program(program):
            yield program
    yield sys.executable
    for name in ("python", "python3"):
        found = shutil.which(name, path=environ.get("PATH", ""))
        if found:
            yield os.path.abspath(found)


def _list_project_folders() -> list[Path]:
    """Return the current folder and those above it, up to the root of its repository."""
    here = Path.cwd()
    above = [here, *here.parents]
    root = next((number for number, folder in enumerate(above) if (folder / ".git").exists()), 0)
    return above[: root + 1]


@functools.cache
def _choose_with_torch(interpreters: Sequence[str]) -> str:
    return next(filter(None, map(_find_torch, interpreters)), interpreters[0])


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def has_torch(interpreter: str) -> bool:
    """Return whether an interpreter finds PyTorch."""
    return bool(_find_torch(interpreter))


def _find_torch(interpreter: str) -> str:
    """Return the path of an interpreter that finds PyTorch, else an empty string. A shim starts another one."""
    if interpreter == sys.executable:
        return interpreter if importlib.util.find_spec("torch") is not None else ""
    try:
        done = subprocess.run([interpreter, "-c", _PROBE], capture_output=True, check=False, timeout=_PYTHON_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    return os.fsdecode(done.stdout.strip()) or interpreter


def describe_environment(resource: Mapping[str, Any], folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return facts about the machine by name. ``folder``: the working directory, whose commit is included."""
    facts = {
        "host": f"{platform.node()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}",
        "directory": str(folder),
        "commit": describe_commit(folder),
        "versions": _describe_versions(resource, environ),
    }
    code = resource["spec"].get("code")
    if code:
        facts["code"] = f"{code.get('revision', '')} digest {code['digest']}".lstrip()
    containers = resource["spec"]["template"]["spec"]["containers"]
    variables = {**environ, **{entry["name"]: str(entry.get("value", "")) for entry in containers[0].get("env") or ()}}
    facts["variables"] = " ".join(
        f"{name}={value}"
        for name, value in sorted(variables.items())
        if _RELEVANT.match(name) and not _SECRET.search(name)
    )
    return {name: value for name, value in facts.items() if value}


def _describe_versions(resource: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the versions of Python and PyTorch, or the path of the interpreter if it is not that of `ddp run`."""
    interpreter = find_interpreter(resolve_template(parse_resource(resource, SCHEMA)).command.interpreter, environ)
    if interpreter != sys.executable:
        return f"ddp {__version__}, {interpreter}"
    return ", ".join((f"ddp {__version__}", f"Python {platform.python_version()}", *_read_versions("torch", "numpy")))


def describe_commit(folder: Path) -> str:
    """Return the commit of a folder and whether files differ from it; empty without a repository or git."""
    commit = ask_git(folder, "log", "-1", "--format=%h %s", seconds=_GIT_SECONDS)
    if not commit:
        return ""
    changed = ask_git(
        folder, "status", "--porcelain", "--ignore-submodules", "--untracked-files=no", seconds=_GIT_SECONDS
    )
    return commit + (" (with uncommitted changes)" if changed else "")


def _read_versions(*packages: str) -> list[str]:
    versions = []
    for name in packages:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return versions


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def find_gpus(
    environ: Mapping[str, str], *, devices: Path = Path("/dev"), amd_nodes: Path = _AMD_NODES
) -> tuple[str, ...]:
    """Return the ids of the GPUs that this user's processes may use, in the format of CUDA_VISIBLE_DEVICES.

    NVIDIA's GPUs, else AMD's; HIP reads the same variable.
    """
    if VISIBLE_DEVICES in environ:
        ids = (part.strip() for part in environ[VISIBLE_DEVICES].split(","))
        return tuple(gpu for gpu in ids if gpu not in ("", "-1"))
    count = _count_with_driver()
    if count is None:
        count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    if count == 0:
        count = sum(map(_is_amd_gpu, amd_nodes.glob("*/gpu_id")))
    return tuple(map(str, range(count)))


def _is_amd_gpu(path: Path) -> bool:
    """Return whether a node of AMD's driver is a usable GPU; the id of a CPU is 0."""
    try:
        return int(path.read_text()) != 0
    except (OSError, ValueError):
        return False


@functools.cache
def _count_with_driver() -> int | None:
    """Return the number of GPUs that nvidia-smi lists, called once per process; None if it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        # The driver can take seconds to wake up, and hangs where it is broken.
        result = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if result.returncode else sum(line.startswith("GPU ") for line in result.stdout.splitlines())


class GpuPool:
    """Assigns each GPU to at most one pod."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = tuple(ids)
        self._free = list(ids)
        self._held: dict[str, list[str]] = {}

    def take(self, holder: str, count: int) -> list[str] | None:
        """Assign ``count`` GPUs to the holder and return them; None: too few are free."""
        if count > len(self._free):
            return None
        taken = self._free[:count]
        self._free = self._free[count:]
        self._held[holder] = taken
        return taken

    def give_back(self, holder: str) -> None:
        """Free the holder's GPUs; free GPUs stay in the machine's order."""
        free = {*self._free, *self._held.pop(holder, [])}
        self._free = [gpu for gpu in self._ids if gpu in free]
