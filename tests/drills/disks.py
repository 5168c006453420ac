"""Faults of checkpoints: a full or slow disk, and damaged or deleted files."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.drills.core import DrillOutcome, NotHere, Perished, drill
from tests.drills.scene import EVERY, Running, Scene, check_lost, kill

_ROOM = 16 << 20


@drill("disk-full", "no room for checkpoints: training goes on, and a restart finds the last whole one")
def fill_disk(scene: Scene) -> DrillOutcome:
    claims = _claims(scene)
    claims.mkdir(parents=True)
    mounted = os.geteuid() == 0 and _mount(scene, claims)
    run = scene.start()
    scene.until_step(run)
    free = _fill(claims) if mounted else _limit_files(run)
    scene.until(lambda: run.said("was not saved"), "a checkpoint that is not saved", alive=run)
    whole = max(_saved(claims))
    struck = kill([run.tree().workers[1]])
    free()
    run.succeed(restarts=0, in_place=1)
    outcome = scene.recovery(struck, floor="ranks", note="" if mounted else "by a limit on file size: needs root")
    _insist_on(scene, run, whole)
    scene.check_state()
    return outcome


@drill("disk-full-run", "no room in the whole folder of `ddp run`, records and all: it goes on, and says so")
def fill_run(scene: Scene) -> DrillOutcome:
    runs = scene.folder / "ddp-runs"
    runs.mkdir()
    if os.geteuid() != 0 or not _mount(scene, runs):
        raise NotHere("needs root, to mount a small disk")
    run = scene.start(arguments=["--log-every", "1000"])
    scene.until_step(run)
    free = _fill(runs)
    scene.until(lambda: "the run continues without" in run.output, "a word about the disk", alive=run)
    struck = kill([run.tree().workers[1]])
    free()
    run.succeed(restarts=0, in_place=1)
    scene.check_state()
    return scene.recovery(struck, floor="ranks")


@drill("disk-slow", "each sync takes half a second: steps do not wait for it, and a kill in a write does no harm")
def slow_disk(scene: Scene) -> DrillOutcome:
    run = scene.start(env={"DRILL_SLOW_SYNC": "0.5"})
    scene.until(lambda: list(_claims(scene).glob(".step-*.tmp")) and _saved(_claims(scene)), "a write", alive=run)
    struck = kill([run.tree().workers[1]])
    run.succeed(restarts=0, in_place=1)
    scene.check_state()
    return scene.recovery(struck, floor="ranks", note="slow by the script's own fsync")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@drill("checkpoint-truncated", "the newest checkpoint is cut in half: the one before it serves")
def truncate(scene: Scene) -> DrillOutcome:
    return _damage(scene, _cut, "is damaged")


@drill("checkpoint-flipped", "one bit of the newest checkpoint is wrong: the one before it serves", fast=True)
def flip(scene: Scene) -> DrillOutcome:
    return _damage(scene, _flip, "is damaged")


@drill("checkpoint-missing", "the newest checkpoint's data are gone: the one before it serves")
def remove(scene: Scene) -> DrillOutcome:
    return _damage(scene, Path.unlink, "can't be read")


def _damage(scene: Scene, how: Callable[[Path], None], words: str) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    tree = run.tree()
    claims = _claims(scene)
    last = _stop_between_saves(scene, run, tree.workers[1])
    # On a busy machine the last save may not have started yet.
    scene.until(lambda: last in _saved(claims), f"the checkpoint of step {last}", alive=run)
    older, newest = _saved(claims)[-2:]
    (path,) = claims.glob(f"step-{newest:09d}*.pt")
    how(path)
    struck = kill([tree.workers[1]])
    run.succeed(restarts=0, in_place=1)
    if not run.said(words):
        raise Perished(f"no word about the checkpoint\n{run.output}")
    _insist_on(scene, run, older)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="ranks"), 3 * EVERY)


def _stop_between_saves(scene: Scene, run: Running, pid: int) -> int:
    """Stop rank 1 at a point where rank 0, which may finish its step, cannot save again. Return the last save."""
    while True:
        kill([pid], signal.SIGSTOP)
        made = scene.steps()[-1].step + 1
        if made % EVERY in (1, 2):
            return made - made % EVERY
        kill([pid], signal.SIGCONT)
        scene.until_step(run, made + 1)


def _claims(scene: Scene) -> Path:
    return scene.folder / "ddp-runs" / "claims" / "drill"


def _saved(claims: Path) -> list[int]:
    """Return the steps of the complete checkpoints."""
    return sorted(int(json.loads(path.read_text())["step"]) for path in claims.glob("step-*.json"))


def _insist_on(scene: Scene, run: Running, step: int) -> None:
    """Check that training resumed from this checkpoint."""
    first = scene.steps()[0].pid
    begun = next(item.step for item in scene.steps() if item.pid != first)
    if begun != step:
        raise Perished(f"training went on from step {begun}, not {step}\n{run.output}")


def _mount(scene: Scene, folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        return False
    scene.on_leaving(lambda: subprocess.run(["umount", "-l", str(folder)], check=True))
    return True


def _fill(folder: Path) -> Callable[[], None]:
    """Fill a file system completely. Return a function that frees the space."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler.unlink


def _limit_files(run: Running) -> Callable[[], None]:
    """Prevent rank 0 from writing files as large as a checkpoint, until its process ends."""
    resource.prlimit(run.tree().workers[0], resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    return lambda: None
