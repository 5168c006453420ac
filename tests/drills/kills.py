"""Processes that are killed or stopped."""

from __future__ import annotations

import signal

from tests.drills.core import DrillOutcome, Perished, check_blamed, drill
from tests.drills.scene import EVERY, STEPS, STRIKE, Scene, kill


def check_lost(outcome: DrillOutcome, limit: int = 2 * EVERY) -> DrillOutcome:
    """Check that only the steps after the newest checkpoint, or the one before it, are lost."""
    if outcome.lost is not None and outcome.lost > limit:
        raise Perished(f"{outcome.lost} steps were lost, with a checkpoint every {EVERY}")
    return outcome


@drill("worker-killed", "SIGKILL of one worker: restarted in the same pods, by the agents")
def kill_worker(scene: Scene) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    struck = kill([run.tree().workers[1]])
    run.succeed(restarts=0, in_place=1)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="ranks"))


@drill("agent-killed", "SIGKILL of torchrun's agent in pod 1: its launcher starts another")
def kill_agent(scene: Scene) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    struck = kill([run.tree().agents[1]])
    run.succeed(restarts=0, in_place=1)
    if not run.said("restarting torchrun's agent"):
        raise Perished(f"no launcher said that it began again\n{run.output}")
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("master-agent-killed", "SIGKILL of the agent in pod 0, whose store lives on beside it")
def kill_master_agent(scene: Scene) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    struck = kill([run.tree().agents[0]])
    run.succeed(restarts=0, in_place=1)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("pod-killed", "SIGKILL of pod 1's first process: a new attempt of the group")
def kill_pod(scene: Scene) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    struck = kill([run.tree().launchers[1]])
    status = run.succeed(restarts=1)
    if status["restarts"]["counted"] != 1:
        raise Perished(f"one restart is to be counted: {status['restarts']}")
    check_blamed(status, 1)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("master-pod-killed", "SIGKILL of pod 0's first process, with the rendezvous' store in it")
def kill_master_pod(scene: Scene) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    struck = kill([run.tree().launchers[0]])
    status = run.succeed(restarts=1)
    check_blamed(status, 0)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("all-killed", "SIGKILL of every process of every pod at once, as when a machine ends")
def kill_all(scene: Scene) -> DrillOutcome:
    run = scene.start()
    scene.until_step(run)
    struck = kill(run.tree().all)
    run.succeed(restarts=1)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("run-killed", "SIGKILL of `ddp run` itself: nothing runs on; started again it goes on from the checkpoint")
def kill_run(scene: Scene) -> DrillOutcome:
    first = scene.start()
    scene.until_step(first)
    first.note_ports()
    kill([first.process.pid])
    first.process.wait()
    scene.check_nothing_left(temporary=False)
    assert first.run_folder is not None
    for name in ("status.yaml.tmp", "metrics/attempt-1-pod-0.prom.tmp"):
        (first.run_folder / name).write_text("half a sta")  # as if the kill interrupted the write
    page = first.report()
    reasons = {condition["type"]: condition["reason"] for condition in first.status()["conditions"]}
    if reasons.get("Failed") != "Interrupted":
        raise Perished(f"the status of a run that was killed says {reasons}")
    if (
        ">Interrupted</span>" not in page
        or "Resume from the checkpoint of step " not in page
        or f" on {scene.kept} with: ddp run job-0" not in page
    ):
        raise Perished(f"the report does not say that nobody runs it any more\n{page}")
    again = scene.start()
    struck = again.began
    again.succeed(restarts=0, in_place=0)
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents"))


@drill("rank-stopped", "SIGSTOP of one rank: the watchdog names it, ends the workers, and they start again")
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
        raise Perished(f"pod 0 has ended the wait before the pod to blame\n{run.output}")
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
        watchdog={"startSeconds": 240, "stallSeconds": int(stall)},
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


@drill("graceful-stop", "SIGTERM to `ddp run`: all ranks save the same step; started again nothing is lost")
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
        raise Perished(f"{made} steps, then {len(scene.steps()) - made} more: one was made twice, or none was left")
    scene.check_state()
    return scene.recovery(again.began, floor="agents")
