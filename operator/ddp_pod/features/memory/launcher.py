"""The copies in memory, in the pod's first process."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ...base.launcher_part import LauncherPart
from ...base.pod import Pod
from ...base.service import Control, Ending, Service
from .copies import find_memory_folder, remove_memory, save_copies, summarize_copies


class MemoryKeeper(Service):
    """Saves the copies for the next attempt, and deletes them."""

    name = "memory"

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._control: Control | None = None

    def start(self, control: Control) -> None:
        """Start, with what knows the deadline of the pod."""
        self._control = control

    def finish(self, ending: Ending) -> None:
        """Save the copies that are newer than the script's checkpoint, and delete all.

        It waits for the disk, as it has to be done before the mirror uploads the folder.
        """
        node = self._pod.node
        if not ending.succeeded:
            step = -1.0 if ending.checkpoint_step is None else ending.checkpoint_step
            finish_by = None if self._control is None else self._control.finish_by
            deadline = time.monotonic() + self._pod.grace if finish_by is None else finish_by
            save_copies(node, os.environ, checkpoint_step=step, deadline=deadline)
        remove_memory(node, os.environ, succeeded=ending.succeeded)

    def report(self) -> Mapping[str, object]:
        """Return what the pod reports about its copies."""
        return {"memory": summarize_copies(find_memory_folder(self._pod.node, os.environ))}


def _create(pod: Pod, reader: Any) -> Sequence[Service]:
    return (MemoryKeeper(pod),)


PART = LauncherPart(create=_create)
