"""`ddp drill --lose-node`: a person cuts off a node; the drill measures and judges what follows."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from ddp_cli.commands.io import CommandError, ExitCode
from ddp_cli.features.drill.lost_node import ChosenPod, NodeLoss, NodeReturn, Sighting, await_loss, await_return, judge
from ddp_cli.features.drill.node_target import NodeTarget
from ddp_cli.features.drill.pods import RunEnded
from ddp_cli.features.drill.recovery import Sample, describe_loss
from ddp_cli.view.terminal import print_text

_START_SECONDS: Final = 180.0


def lose_node(
    target: NodeTarget, output: str, *, after: int, timeout: float, clock: Callable[[], float] = time.monotonic
) -> int:
    """Wait until the job trains, and measure how it loses a node and gets it back. Raises: CommandError."""
    if not after:
        raise CommandError("--lose-node needs a job that reports steps, and --after of at least 1", ExitCode.BAD_INPUT)
    sightings = target.sightings()
    pod = target.choose()
    try:
        before = _await_steps(sightings, after, clock() + _START_SECONDS)
        print_text(describe_fault(pod), file=sys.stderr)
        loss = await_loss(sightings, pod, before, timeout, clock)
        if loss is None:
            raise CommandError(f"node {pod.node} was not lost within {timeout:.0f} s", ExitCode.FAILED)
        if output != "json":
            print_loss(loss)
        back = None
        if loss.recovery is not None and loss.lost is not None:
            print_text(f"Start node {pod.node} again, or end the drill with Ctrl-C.", file=sys.stderr)
            back = await_return(sightings, loss, timeout, clock)
    except RunEnded as end:
        raise CommandError(f"the job ended ({end.phase}) during the drill; train for longer", ExitCode.FAILED) from None
    print_return(loss, back, output)
    return ExitCode.OK


def _await_steps(sightings: Iterator[Sighting], after: int, until: float) -> Sample:
    for sighting in sightings:
        if sighting.sample is not None and (sighting.sample.steps_of_process or 0) >= after:
            return sighting.sample
        if sighting.time > until:
            break
    raise CommandError(f"rank 0 has not completed {after} steps, and a drill needs a job that trains", ExitCode.FAILED)


def describe_fault(pod: ChosenPod) -> str:
    """Return what the person has to do."""
    return (
        f"Pod {pod.name} is on node {pod.node}. Cut the node off now: switch off its power or its network, or restart "
        "it without warning, as root on it:\n\n    echo b > /proc/sysrq-trigger\n\n"
        "All pods of the node are lost. A drain, an orderly shutdown and a stopped kubelet lose none, and measure "
        "nothing."
    )


def print_loss(loss: NodeLoss) -> None:
    """Print what the loss of a node has cost."""
    recovery = loss.recovery
    print_text(f"node        {loss.pod.node}, with pod {loss.pod.name}; times from the last step before")
    print_text(f"named       {loss.named:.1f} s ({loss.reason})")
    print_text(f"lost        {_describe_seconds(loss.lost)}")
    if recovery is None:
        print_text("next step   none")
        return
    level = "new attempt" if recovery.level == "group" else "the pod was replaced"
    print_text(f"next step   {recovery.seconds:.1f} s ({level})")
    print_text(f"steps lost  {describe_loss(recovery)}")


def print_return(loss: NodeLoss, back: NodeReturn | None, output: str) -> None:
    """Print what the return of the node has done, and the verdict; all as JSON for ``output``: json."""
    verdict = judge(loss, back)
    recovery = loss.recovery
    if output == "json":
        parts = {
            "node": loss.pod.node,
            "pod": loss.pod.name,
            "reason": loss.reason,
            "namedSeconds": round(loss.named, 2),
            "lostSeconds": None if loss.lost is None else round(loss.lost, 2),
            "recoverySeconds": None if recovery is None else round(recovery.seconds, 2),
            "stepsLost": None if recovery is None else recovery.steps_lost,
            "counted": loss.counted,
            "returnSeconds": None if back is None else round(back.seconds, 2),
            "restartsAfterRecovery": None if back is None else back.restarts,
            "podLeft": None if back is None else back.left,
            "verdict": verdict,
        }
        print_text(json.dumps(parts, indent=2))
        return
    known = "not within the time" if back is None else f"{back.seconds:.1f} s later new pods may use the node"
    print_text(f"return      {known}")
    print_text(f"verdict     {verdict}")


def _describe_seconds(seconds: float | None) -> str:
    return "not declared" if seconds is None else f"{seconds:.1f} s"
