"""Run a program in a pod of a run on this machine, as pods/exec does in a cluster."""

import os
from typing import NamedTuple

from ddp_cli.client.errors import Conflict
from ddp_cli.local.folder import PID_FILE, RunFolder
from ddp_operator.api.constants import ENV_RUNTIME_DIR


class LocalPod(NamedTuple):
    """A running pod: the words that start its launcher, its environment and its folder."""

    launcher: tuple[str, ...]
    environment: dict[str, str]
    folder: str


def find_local_pod(folder: RunFolder, node: int) -> LocalPod:
    """Return the running pod with an index, by the state of its first process. Raises: Conflict."""
    file = folder.find_pod_file(node, PID_FILE)
    try:
        if file is None:
            raise ValueError
        process = f"/proc/{int(file.read_text(encoding='ascii'))}"
        environment = dict(pair.split("=", 1) for pair in _read_words(f"{process}/environ") if "=" in pair)
        if environment.get(ENV_RUNTIME_DIR) != os.path.abspath(file.parent / "runtime"):
            raise ValueError  # the number belongs to another process now
        words = _read_words(f"{process}/cmdline")
        launcher = tuple(words[: words.index("run")])
        return LocalPod(launcher, environment, os.readlink(f"{process}/cwd"))
    except (OSError, ValueError):
        remedy = "start the run again" if not folder.in_use else "see `ddp logs`"
        raise Conflict(f"{folder.path}: pod {node} does not run; {remedy}") from None


def _read_words(path: str) -> list[str]:
    with open(path, "rb") as file:
        return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
