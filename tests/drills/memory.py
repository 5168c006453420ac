"""Faults of a job with copies in memory after each step: no completed step is repeated."""

from __future__ import annotations

from pathlib import Path

import psutil

from ddp_pod.features.memory.copies import MemoryCopy, list_copies
from tests.drills.core import DrillOutcome, Perished, drill
from tests.drills.scene import CHECKPOINT, STRIKE, Running, Scene, check_lost, kill

_CHECKPOINT = {**CHECKPOINT, "memoryInterval": 1}
# After the last of these steps the job has a checkpoint on the disk that is older than the copies.
_LAST = STRIKE + 1


def start(scene: Scene) -> Running:
    """Start a job with copies in memory, and wait until all pods have copied a step."""
    run = scene.start(env={"DRILL_PAUSE_BEFORE": "1"}, checkpoint=_CHECKPOINT)
    scene.until_step(run, _LAST)
    copied = len(scene.steps())
    scene.until(lambda: all(newest.step >= copied for newest in list_newest(run)), "copies in memory", alive=run)
    return run


def list_newest(run: Running) -> list[MemoryCopy]:
    """Return the newest copy of each pod."""
    newest = []
    for pid in run.tree().launchers.values():
        folder = Path(psutil.Process(pid).environ()["DDP_MEMORY_DIR"])
        copies = [copy for pod in folder.glob("pod-*") for copy in list_copies(str(pod))]
        newest.append(max(copies, key=lambda copy: copy.step))
    return newest


def check_none_lost(scene: Scene, run: Running, struck: float, floor: str) -> DrillOutcome:
    """Check that no step was repeated, and that the state is that of an undisturbed run."""
    if not run.said("resumed from memory: "):
        raise Perished(f"the ranks have not continued from memory\n{run.output}")
    scene.check_state()
    return check_lost(scene.recovery(struck, floor=floor), limit=0)


@drill(
    "memory-all-killed", "SIGKILL of every process of every pod: training continues from the disk, as without copies"
)
def kill_all(scene: Scene) -> DrillOutcome:
    run = start(scene)
    struck = kill(run.tree().all)
    run.succeed(restarts=1)
    if run.said("resumed from memory: "):
        raise Perished(f"copies of lost pods were used\n{run.output}")
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill(
    "memory-damaged", "one wrong bit in the newest copy of every pod, then a killed worker: the copies before are used"
)
def damage_copies(scene: Scene) -> DrillOutcome:
    run = start(scene)
    worker = run.tree().workers[1]
    process = psutil.Process(worker)
    process.suspend()  # so that no further copy is complete before the kill
    damaged = list_newest(run)
    for copy in damaged:
        with open(copy.path, "r+b") as file:
            file.seek(copy.size // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    struck = kill([worker])
    run.succeed(restarts=0, in_place=1)
    if not run.said(r"the copy of step \d+ in pod \d is damaged; it is not used"):
        raise Perished(f"no rank reports the damaged copy\n{run.output}")
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="ranks"), limit=2)
