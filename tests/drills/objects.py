"""Actions of users and controllers on a job's objects while it trains."""

from __future__ import annotations

from dataclasses import replace

from tests.drills.core import DrillOutcome, Perished, drill
from tests.drills.driven import PROGRAM
from tests.drills.scene import STEPS, Running, Scene, check_lost, kill


def _expect_no_step_twice(scene: Scene, run: Running) -> None:
    made = [step.step for step in scene.steps()]
    if made != list(range(STEPS)):
        raise Perished(f"the steps of rank 0 are not 0 to {STEPS - 1}, each once: {made}\n{run.output}")


@drill("pod-deleted", "somebody deletes pod 1: all ranks save the same step, pod 0 waits for a new pod 1, and goes on")
def delete_pod(scene: Scene) -> DrillOutcome:
    return _delete(scene, 1)


@drill("master-pod-deleted", "somebody deletes pod 0, with the rendezvous' store in it: pod 1 waits for a new pod 0")
def delete_master_pod(scene: Scene) -> DrillOutcome:
    return _delete(scene, 0)


@drill("spare-takes-over", "somebody deletes pod 1 of two: the pod that waits beside them takes its place")
def take_over(scene: Scene) -> DrillOutcome:
    alone = Scene(scene.session, f"{scene.name}-without", fast=scene.fast)
    scene.on_leaving(alone.close)
    without = delete_pod(alone)
    alone.check_nothing_left()
    run = scene.start(program=PROGRAM, spares=1)
    scene.until_step(run)
    scene.until(lambda: run.status()["nodes"].get("spares"), "a spare that is ready", alive=run)
    run.note_ports()
    struck = scene.ask(do="delete pod", index=1)
    folder = run.run_folder
    assert folder is not None
    scene.until(lambda: [*folder.glob("pods/*-1-2-*/runtime/workers/*.json")], "a rank in pod 2", alive=run)
    outcome = _check_replaced(scene, run, 1, struck)
    return replace(outcome, by_hand=without.seconds, note="floor: the same job without a spare, right before")


def _delete(scene: Scene, pod: int) -> DrillOutcome:
    run = scene.start(program=PROGRAM)
    scene.until_step(run)
    run.note_ports()
    struck = scene.ask(do="delete pod", index=pod)
    return _check_replaced(scene, run, pod, struck)


def _check_replaced(scene: Scene, run: Running, pod: int, struck: float) -> DrillOutcome:
    status = run.succeed(restarts=0)
    failure = status["lastFailure"]
    restarts = status["restarts"]
    if restarts["replaced"] != 1 or restarts["counted"] or status["lastRestart"]["level"] != "ReplacedPod":
        raise Perished(f"pod {pod} was not replaced in its Job, or it costs something: {status}\n{run.output}")
    if failure["category"] != "PodDeleted" or failure["node"] != pod:
        raise Perished(f"not told as a disruption of pod {pod}: {failure}")
    _expect_no_step_twice(scene, run)
    scene.check_state()
    return scene.recovery(struck, floor="agents")


@drill("recreated", "the resource is deleted and made anew at once under its name, while its pods still run")
def recreate(scene: Scene) -> DrillOutcome:
    run = scene.start(program=PROGRAM)
    scene.until_step(run)
    run.note_ports()
    struck = scene.ask(do="recreate")
    status = run.succeed(restarts=0)
    if status["attempt"] != 1 or "lastFailure" in status:
        raise Perished(f"the new job bears marks of the old one: {status}")
    _expect_no_step_twice(scene, run)
    scene.check_state()
    return scene.recovery(struck, floor="agents")


@drill("spec-edited", "during a restart the job is suspended, given another time to live, and resumed")
def edit_spec(scene: Scene) -> DrillOutcome:
    run = scene.start(program=PROGRAM)
    scene.until_step(run)
    struck = kill([run.tree().launchers[1]])
    scene.until(lambda: run.status()["attempt"] == 2, "the second attempt", alive=run)
    scene.ask(do="edit", spec={"suspend": True})
    scene.until(lambda: run.status()["phase"] == "Suspended", "a suspension", alive=run)
    scene.ask(do="edit", spec={"suspend": False, "ttlSecondsAfterFinished": 3600})
    status = run.succeed()
    if status["restarts"]["counted"] != 1 or status["lastFailure"]["node"] != 1:
        raise Perished(f"the failure is not told: {status['restarts']}, {status['lastFailure']}")
    scene.check_state()
    return check_lost(scene.recovery(struck, floor="agents", note="with a suspension in between"))
