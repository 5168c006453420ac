"""A launcher that has imported PyTorch already and waits for its run: a child of the process that holds a pod."""

import json
import os
from collections.abc import MutableMapping
from dataclasses import dataclass, replace

from ...base.launcher_part import NextRun
from ...base.pod import Pod
from ...contract.names import ENV_RUN_FD
from ...contract.plan import from_json, to_json
from ...contract.processes import set_parent_death_signal


@dataclass(frozen=True)
class RunStart:
    """The run that a launcher on standby starts.

    ``command``: what follows ``python``, or a program; ``archive``, ``digest``: the code, empty for the plan's;
    ``former``: the archive that was unpacked before, if any.
    """

    command: tuple[str, ...]
    archive: str = ""
    digest: str = ""
    former: str = ""


class Standby:
    """Waits for a run. The process dies with its parent."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        set_parent_death_signal(os.getppid())

    def wait(self, pod: Pod) -> NextRun | None:
        """Return the run, None if the holder needs this process no longer."""
        with open(self._descriptor, encoding="utf-8") as file:
            line = file.read()
        if not line:
            return None
        start: RunStart = from_json(RunStart, json.loads(line))
        if pod.code is not None and start.archive:
            pod = replace(pod, code=replace(pod.code, archive=start.archive, digest=start.digest))
        return NextRun(list(start.command), pod, start.former)


def find_standby(env: MutableMapping[str, str]) -> Standby | None:
    """Return the wait that the holder has requested of this process; None: it is no child of a holder."""
    descriptor = env.pop(ENV_RUN_FD, None)
    if not descriptor:
        return None
    os.set_inheritable(int(descriptor), False)  # the fork server and its ranks start while this one is open
    return Standby(int(descriptor))


def encode_start(start: RunStart) -> bytes:
    """Return what the holder writes for ``Standby.wait``, before it closes the pipe."""
    return json.dumps(to_json(start)).encode()
