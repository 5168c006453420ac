"""Faults of a script itself: exceptions, losses that are not a number, and exhausted memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from tests.drills.core import DrillOutcome, Perished, drill
from tests.drills.driven import PROGRAM
from tests.drills.scene import EVERY, STRIKE, Running, Scene, check_lost
from tests.support.counts import read_counts

SAVED = STRIKE - STRIKE % EVERY
"""The step of the newest checkpoint when a fault is injected."""
_LIMIT = 1200 << 20  # bytes: a launcher, an agent and a worker need half of it
# $0 is the group: enter it, and show its files where a container has them.
_IN_V1 = 'echo $$ > "$0/cgroup.procs" && mount --bind "$0" /sys/fs/cgroup/memory && exec "$@"'
_IN_V2 = 'echo $$ > "$0/cgroup.procs" && mount --bind "$0" /sys/fs/cgroup && exec "$@"'


def _struck(scene: Scene) -> float:
    return float((scene.witness / "struck").read_text())


def _expect(run: Running, actual: object, expected: object, subject: str) -> None:
    if actual != expected:
        raise Perished(f"{subject}: {actual!r}, not {expected!r}\n{run.output}")


@drill("exception-once", f"one rank raises an exception before step {STRIKE}, once: restarted in the same pods")
def raise_once(scene: Scene) -> DrillOutcome:
    run = scene.start(env={"DRILL_FAULT": f"raise:1:{STRIKE}:1"})
    run.succeed(restarts=0, in_place=1)
    scene.check_state()
    return check_lost(scene.recovery(_struck(scene), floor="ranks"))


@drill("exception-always", "the same every time: after the second the job fails and says why, whatever its budgets")
def raise_always(scene: Scene) -> DrillOutcome:
    run = scene.start(env={"DRILL_FAULT": f"raise:1:{STRIKE}:99"})
    status = run.end(1)
    failure = status["lastFailure"]
    _expect(run, len(list(scene.witness.glob("fault-*"))), 2, "how often the exception was raised")
    _expect(run, (status["phase"], status["attempt"], read_counts(status)["counted"]), ("Failed", 1, 1), "status")
    _expect(run, (failure["category"], failure["rank"]), ("UserError", 1), "lastFailure")
    _expect(run, failure["message"], f"RuntimeError: broken on purpose at step {STRIKE}", "message")
    _expect(run, "in strike" in failure["traceback"], True, "a traceback that leads to the line")
    scene.check_state(SAVED)
    return DrillOutcome(note="fails, as its policy says")


@drill("loss-not-finite", "a loss that is no number, with --nonfinite stop: the job ends and names step and rank")
def spoil_loss(scene: Scene) -> DrillOutcome:
    run = scene.start(arguments=["--nonfinite", "stop"], env={"DRILL_FAULT": f"nan:1:{STRIKE}:1"})
    status = run.end(1)
    failure = status["lastFailure"]
    _expect(run, (status["phase"], status["attempt"]), ("Failed", 1), "status")
    _expect(run, failure["category"], "UserError", "category")
    words = f"the loss of step {STRIKE + 1} on rank 1 is not a finite number"
    _expect(run, words in failure["message"], True, f"message with {words!r}, which is {failure['message']!r}")
    scene.check_state(SAVED)
    return DrillOutcome(note="fails, as its policy says; nothing after the loss is saved")


@drill("out-of-memory", "the kernel kills a worker that grows beyond its pod's memory: a new attempt, category OOM")
def eat_memory(scene: Scene) -> DrillOutcome:
    prefix, kind, note = _memory_group(scene)
    scene.env["DRILL_PREFIX_1"] = prefix
    run = scene.start(
        program=PROGRAM,
        env={"DRILL_FAULT": f"{kind}:1:{STRIKE}:1"},
        recovery={"inPlaceRestarts": 0, "maxRestarts": 2},
    )
    status = run.succeed(restarts=1)
    failure = status["lastFailure"]
    _expect(run, (failure["category"], failure["podIndex"]), ("OOM", 1), "lastFailure")
    scene.check_state()
    return check_lost(scene.recovery(_struck(scene), floor="agents", note=note))


def _memory_group(scene: Scene) -> tuple[str, str, str]:
    """Create a memory cgroup for pod 1. Return the prefix of its command, the kind of fault, and a note."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    root = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory")
    group = root / f"ddp-drill-{os.getpid()}-{time.monotonic_ns()}"
    try:
        if v2:
            (root / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        scene.on_leaving(lambda: _remove_group(group))
        (group / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(_LIMIT))
        swap, room = (group / "memory.swap.max", 0) if v2 else (group / "memory.memsw.limit_in_bytes", _LIMIT)
        if swap.exists():
            swap.write_text(str(room))
        script = _IN_V2 if v2 else _IN_V1
        probe = ["unshare", "-m", "sh", "-c", script, str(group), "true"]
        subprocess.run(probe, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "", "limit", "a limit of the process, no cgroup: needs root"
    return "\n".join(["unshare", "-m", "sh", "-c", script, str(group)]), "eat", ""


def _remove_group(group: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.05)  # the kernel is still removing its last process
                continue
        return
