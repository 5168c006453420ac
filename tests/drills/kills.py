"""Processes that are killed or stopped."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.drills import memory
from tests.drills.core import DrillOutcome, Perished, check_blamed, drill
from tests.drills.scene import EVERY, STEPS, STRIKE, ProcessTree, Scene, check_lost, kill
from tests.support.counts import read_counts


class Kill(NamedTuple):
    """A drill that sends SIGKILL to processes of a training job.

    ``victims``: their pids. ``in_place``: whether the workers restart in the same pods, instead of a new attempt.
    ``blamed``: the pod to which the status attributes the failure; None: any. ``counted``: whether the restart must be
    counted. ``line``: of the pods' logs. ``in_memory``: the job keeps copies in memory, so that no step is repeated.
    """

    name: str
    about: str
    victims: Callable[[ProcessTree], list[int]]
    in_place: bool = False
    floor: str = "agents"
    blamed: int | None = None
    counted: bool = False
    line: str = ""
    in_memory: bool = False


KILLS = (
    Kill(
        "worker-killed",
        "SIGKILL of one worker: restarted in the same pods, by the agents",
        lambda tree: [tree.workers[1]],
        in_place=True,
        floor="ranks",
    ),
    Kill(
        "agent-killed",
        "SIGKILL of torchrun's agent in pod 1: its launcher starts another",
        lambda tree: [tree.agents[1]],
        in_place=True,
        line="restarting torchrun's agent",
    ),
    Kill(
        "master-agent-killed",
        "SIGKILL of the agent in pod 0, whose store continues beside it",
        lambda tree: [tree.agents[0]],
        in_place=True,
    ),
    Kill(
        "pod-killed",
        "SIGKILL of pod 1's first process: a new attempt of the group",
        lambda tree: [tree.launchers[1]],
        blamed=1,
        counted=True,
    ),
    Kill(
        "master-pod-killed",
        "SIGKILL of pod 0's first process, with the rendezvous' store in it",
        lambda tree: [tree.launchers[0]],
        blamed=0,
    ),
    Kill("all-killed", "SIGKILL of every process of every pod at once, as when a machine fails", lambda tree: tree.all),
    Kill(
        "memory-worker-killed",
        "SIGKILL of one worker: all ranks continue from the copies of the last step",
        lambda tree: [tree.workers[1]],
        in_place=True,
        floor="ranks",
        in_memory=True,
    ),
    Kill(
        "memory-agent-killed",
        "SIGKILL of torchrun's agent in pod 0, with the first copy's writer",
        lambda tree: [tree.agents[0]],
        in_place=True,
        in_memory=True,
    ),
    Kill(
        "memory-pod-killed",
        "SIGKILL of pod 1's first process: its memory is lost, pod 0 saves its own copy",
        lambda tree: [tree.launchers[1]],
        in_memory=True,
    ),
    Kill(
        "memory-master-pod-killed",
        "SIGKILL of pod 0's first process: pod 1 saves its copy for the next attempt",
        lambda tree: [tree.launchers[0]],
        in_memory=True,
    ),
)


def run_kill(scene: Scene, kill_drill: Kill) -> DrillOutcome:
    """Train, kill the processes of a table row, and check the recovery."""
    if kill_drill.in_memory:
        run = memory.start(scene)
    else:
        run = scene.start()
        scene.until_step(run)
    struck = kill(kill_drill.victims(run.tree()))
    if kill_drill.in_place:
        status = run.succeed(restarts=0, in_place=1)
    else:
        status = run.succeed(restarts=1)

    if kill_drill.line and not run.said(kill_drill.line):
        raise Perished(f"no launcher has logged: {kill_drill.line}\n{run.output}")
    if kill_drill.blamed is not None:
        check_blamed(status, kill_drill.blamed)
    if kill_drill.counted and read_counts(status)["counted"] != 1:
        raise Perished(f"one restart must be counted: {read_counts(status)}")
    if kill_drill.in_memory:
        return memory.check_none_lost(scene, run, struck, kill_drill.floor)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor=kill_drill.floor))


for row in KILLS:
    drill(row.name, row.about)(partial(run_kill, kill_drill=row))


@drill("run-killed", "SIGKILL of `ddp run` itself: no process remains; a new start resumes from the checkpoint")
def kill_run(scene: Scene) -> DrillOutcome:
    first = scene.start()
    scene.until_step(first)
    first.note_ports()
    kill([first.process.pid])
    first.process.wait()
    scene.check_nothing_left(temporary=False)
    assert first.run_folder is not None
    for name in ("status.yaml.tmp", "reports/attempt-1-pod-0.json.tmp"):
        (first.run_folder / name).write_text("half a sta")  # as if the kill interrupted the write
    page = first.report()
    if (
        ">Interrupted</span>" not in page
        or "Resume from the checkpoint of step " not in page
        or f" on {scene.kept} with: ddp run job-0" not in page
    ):
        raise Perished(f"the report does not show that the run was interrupted\n{page}")
    shutil.rmtree(first.run_folder)  # reading commands delete nothing in it
    again = scene.start()
    struck = again.began
    again.succeed(restarts=0, in_place=0)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("rank-stopped", "SIGSTOP of one rank: the watchdog names it and kills the workers, which restart")
def stop_rank(scene: Scene) -> DrillOutcome:
    stall = 4.0
    # The process stops itself at a step: on a busy machine, an external stop arrives after the last step.
    env = {"DRILL_FAULT": f"stop:1:{STRIKE}:1"}
    run = scene.start(env=env, watchdog={"startSeconds": 240, "stallSeconds": int(stall)})
    run.succeed(restarts=0, in_place=1)
    struck = float((scene.witness / "struck").read_text())
    if not run.said(r"the process of rank 1 is stopped \(SIGSTOP\)"):
        raise Perished(f"the stopped rank is not named\n{run.output}")
    if "killing the workers because of the hang" in run.logs()["attempt-1-pod-0"]:
        raise Perished(f"pod 0 has killed its workers before the pod with the root cause\n{run.output}")
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="ranks", waits=stall, note="floor with stallSeconds 4"))


@drill(
    "rank-hung",
    "a rank hangs in its own code, with no restart in the same pods left: a new attempt, and status names it",
)
def hang_rank(scene: Scene) -> DrillOutcome:
    stall = 4.0
    run = scene.start(
        env={"DRILL_FAULT": f"hang:1:{STRIKE}:1"},
        recovery={"inPlaceRestarts": 0, "maxRestarts": 2},
        watchdog={"startSeconds": 240, "stallSeconds": int(stall), "checkpointSeconds": int(stall)},
    )
    status = run.succeed(restarts=1)
    check_blamed(status, 1)
    failure = status["lastFailure"]
    if (failure["category"], failure["rank"]) != ("Hang", 1) or "rank 1 is in strike (trainee.py:" not in failure[
        "message"
    ]:
        raise Perished(f"status does not name the rank that hung, and where: {failure}")
    scene.check_state()
    struck = float((scene.witness / "struck").read_text())
    return check_lost(scene.recovery(struck, floor="agents", waits=stall, note="floor with stallSeconds 4"))


@drill("graceful-stop", "SIGTERM to `ddp run`: all ranks save the same step; a new start loses nothing")
def stop_run(scene: Scene) -> DrillOutcome:
    first = scene.start()
    scene.until_step(first)
    first.note_ports()
    kill([first.process.pid], signal.SIGTERM)
    first.end(128 + signal.SIGTERM)
    scene.check_nothing_left()
    made = len(scene.steps())
    again = scene.start()
    again.succeed(restarts=0, in_place=0)
    if len(scene.steps()) != STEPS or not EVERY < made < STEPS:
        raise Perished(f"{made} steps, then {len(scene.steps()) - made} more: one was repeated, or none was left")
    scene.check_state()
    return scene.recovery(again.began, floor="agents")
