"""Run a command beside a rank: with its environment, in its working folder. `ddp exec` starts this in a pod."""

import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from ..base.files import log
from ..base.pod import WorkerRecord, read_worker_file
from ..contract.names import (
    ENV_AGENT_PID,
    ENV_COMPLETION_INDEX,
    ENV_LAUNCHER_CONFIG,
    ENV_RENDEZVOUS_SECRET,
    ENV_RUNTIME_DIR,
)
from ..contract.plan import decode_plan

_WITHHELD = (ENV_AGENT_PID, ENV_RENDEZVOUS_SECRET)  # the shim and the launcher remove them
_SHELLS = ("bash", "sh")


class _Rank(NamedTuple):
    """A running rank: the record of its shim, and the environment with which its interpreter started."""

    record: WorkerRecord
    environment: dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Become the command. ``argv``: a local rank, ``--``, and the command; none: a shell. Returns after an error."""
    local_rank = int(argv[0])
    command = list(argv[2:]) or [next(filter(shutil.which, _SHELLS), _SHELLS[-1])]
    rank = _find_rank(local_rank)
    if rank is None:
        log(f"local rank {local_rank} does not run now; the command has the container's environment")
        environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
    else:
        environment = {**rank.environment, **_list_variables(rank.record)}
        _enter_folder(rank.record.pid)
    environment.setdefault("TERM", os.environ.get("TERM", "dumb"))
    for name in _WITHHELD:
        environment.pop(name, None)
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606
    except OSError as error:
        log(f"cannot run {command[0]}: {error.strerror}; name a program of the image")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _find_rank(local_rank: int) -> _Rank | None:
    """Return the newest running process of a local rank; None: it does not run.

    Only processes of this user can be read. Under `ddp run` those of other pods are visible too.
    """
    own = os.environ.get(ENV_RUNTIME_DIR, "")
    ranks = []
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        environment = _read_environment(name)
        runtime = environment.get(ENV_RUNTIME_DIR, "")
        if not runtime or not f"{runtime}/".startswith(f"{own}/" if own else ""):
            continue
        record = read_worker_file(os.path.join(runtime, "workers", f"{local_rank}.json"))
        if record is not None and record.pid == int(name):
            ranks.append(_Rank(record, environment))
    return max(ranks, key=lambda rank: rank.record.started, default=None)


def _read_environment(pid: str) -> dict[str, str]:
    """Return the environment with which a process started; empty if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = [item.partition(b"=") for item in file.read().split(b"\0")]
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def _list_variables(record: WorkerRecord) -> dict[str, str]:
    """Return torchrun's variables. A forked rank got them after the start of its interpreter."""
    host, _, port = record.store.rpartition(":")
    variables = {
        "RANK": str(record.rank),
        "LOCAL_RANK": str(record.local_rank),
        "WORLD_SIZE": str(record.world_size or 1),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": record.run,
    }
    nproc = decode_plan(os.environ.get(ENV_LAUNCHER_CONFIG)).nproc_per_node
    if record.rank != int(os.environ.get(ENV_COMPLETION_INDEX) or 0) * nproc + record.local_rank:
        log(f"this is rank {record.rank} now: in a job with spare pods or of changing size, ranks change their pods")
    return {**variables, "LOCAL_WORLD_SIZE": str(nproc)}


def _enter_folder(pid: int) -> None:
    try:
        os.chdir(f"/proc/{pid}/cwd")
    except OSError:
        pass  # the rank has just ended
