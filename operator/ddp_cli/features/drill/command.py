"""`ddp drill`: kill a rank of a running job, then measure how long the recovery takes and how many steps are lost.

With ``--lose-node`` a person cuts off a node instead (``node_drill``). In a cluster, pods/exec runs the probe in the
job's containers. For a run on this machine it runs in this process.
"""

import argparse
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ddp_cli.client.api import Api, get_job
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ClientError
from ddp_cli.client.logs import list_running_pods
from ddp_cli.client.runs import read_job
from ddp_cli.commands.arguments import add_cluster_arguments, add_local_arguments, add_output_argument, open_job
from ddp_cli.commands.io import CommandError, ExitCode, integer
from ddp_cli.features.drill import probe
from ddp_cli.features.drill.node_drill import lose_node
from ddp_cli.features.drill.node_target import NodeTarget
from ddp_cli.features.drill.pods import RunEnded, build_probe_command, execute_in_pod
from ddp_cli.features.drill.recovery import MeasuredRecovery, Sample, describe_loss, measure, parse_sample
from ddp_cli.local.folder import RunFolder
from ddp_cli.view.terminal import print_text
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.resources import find_metrics_port
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.template import resolve_template

_POLL_SECONDS: Final = 0.2
_START_SECONDS: Final = 180.0
_LOCAL_POLL_SECONDS: Final = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_local_arguments(parser)
    fault = parser.add_mutually_exclusive_group(required=True)
    fault.add_argument("--kill", type=integer(0), metavar="RANK", help="kill the process of this rank")
    fault.add_argument(
        "--lose-node",
        type=integer(0),
        metavar="POD",
        help="cut off the node of the pod with this index yourself (docs/drills.md)",
    )
    parser.add_argument(
        "--after",
        type=integer(0),
        default=3,
        metavar="STEPS",
        help="kill after this many steps; default: 3; 0: as soon as workers run, for a script that reports no steps",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="give up after this time; default: 600"
    )
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = "The job continues. On this machine start it with ddp run --max-restarts 3, or the kill ends it."


def run(arguments: argparse.Namespace) -> int:
    """Run the drill and print the result. Raises: CommandError."""
    job = open_job(arguments)
    phase = job.phase
    if phase != "Running":
        raise CommandError(f"{job.name} is {phase}; a drill needs a Running job", ExitCode.FAILED)
    if arguments.lose_node is not None:
        if not isinstance(job.backend, ClusterBackend):
            raise CommandError("--lose-node: a run on this machine has no nodes", ExitCode.BAD_INPUT)
        node_target = NodeTarget(job.backend.api, job.name, arguments.lose_node)
        return lose_node(node_target, arguments.output, after=arguments.after, timeout=arguments.timeout)
    if isinstance(job.backend, ClusterBackend):
        target: PodTarget | RunTarget = PodTarget(job.backend.api, job.name)
    else:
        target = RunTarget(job.backend.folder(job.name))
    result = drill(target, arguments.kill, after=arguments.after, timeout=arguments.timeout)
    print_result(result, arguments.output)
    return ExitCode.OK


class DrillResult(NamedTuple):
    """The result of a drill: the killed process, such as "rank 1 (process 42)", and the recovery."""

    killed: str
    recovery: MeasuredRecovery


def drill(
    target: "RunTarget | PodTarget",
    rank: int,
    *,
    after: int,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    start: float = _START_SECONDS,
) -> DrillResult:
    """Wait until the job trains, kill a rank, and measure the recovery. Raises: CommandError."""
    samples = target.samples()
    try:
        before = _wait_for_steps(target, rank, samples, after, clock() + start)
        killed = target.kill(rank)
    except RunEnded as end:
        raise CommandError(_explain_early_end(end, after, target.summary), ExitCode.FAILED) from None

    killed_at = clock()
    try:
        recovery = measure(before, killed_at, itertools.takewhile(lambda s: s.time < killed_at + timeout, samples))
    except RunEnded as end:
        raise CommandError(f"killed {killed}; {_explain_late_end(end, target.summary)}", ExitCode.FAILED) from None
    if recovery is None:
        raise CommandError(f"killed {killed}; training did not resume within {timeout:.0f} s", ExitCode.FAILED)
    if before.step is not None and before.steps_of_process is not None:
        recovery = replace(recovery, began_at=max(0, before.step - before.steps_of_process), interval=before.interval)
    return DrillResult(killed, recovery)


def _explain_early_end(end: RunEnded, after: int, summary: str) -> str:
    """Return why no rank was killed, and what to do."""
    if end.phase != "Succeeded":
        return f"the job ended ({end.phase}) before the kill; see {summary} for the cause"
    reached = f"rank 0 completed {after} steps" if after else "its workers were running"
    smaller = " or use a smaller --after" if after > 1 else ""
    return (
        f"the job succeeded before {reached}, so no rank was killed; train for longer{smaller}. For a script that "
        "reports no steps, use --after 0"
    )


def _explain_late_end(end: RunEnded, summary: str) -> str:
    """Return why no recovery was measured after the kill, and what to do."""
    if end.phase == "Succeeded":
        return "the job succeeded before it reported a step after the kill; train for longer, or kill earlier (--after)"
    return f"the job did not recover and ended ({end.phase}); see {summary} for the cause"


def _wait_for_steps(
    target: "RunTarget | PodTarget",
    rank: int,
    samples: Iterator[Sample],
    after: int,
    until: float,
) -> Sample:
    checked = False
    for sample in samples:
        if sample.answered and not checked:
            target.check_rank(rank)
            checked = True
        if after and (sample.steps_of_process or 0) >= after:
            return sample
        if not after and sample.running:
            return replace(sample, step=None, steps_of_process=None)
        if sample.time > until:
            break
    raise CommandError(
        f"rank 0 has not completed {after} steps, and a drill needs a job that trains; "
        "for a script that reports no steps, use --after 0",
        ExitCode.FAILED,
    )


def _build_rank_error(name: str, rank: int, count: int) -> CommandError:
    ranks = "its only rank is 0" if count == 1 else f"its ranks are 0 to {count - 1}"
    return CommandError(f"--kill: {name} has no rank {rank}; {ranks}")


def print_result(result: DrillResult, output: str) -> None:
    """Print the result; ``output``: text or json."""
    recovery = result.recovery
    if output == "json":
        parts = {
            "killed": result.killed,
            "recoverySeconds": round(recovery.seconds, 2),
            "level": recovery.level,
            "stepBefore": recovery.step_before,
            "resumedFrom": recovery.earliest_resume,
            "resumedFromAtMost": recovery.latest_resume,
            "stepsLost": recovery.steps_lost,
            "fromBeginning": recovery.from_beginning if recovery.steps_lost is not None else None,
        }
        print_text(json.dumps(parts, indent=2))
        return
    level = {"process": "workers restarted in the same pods", "pod": "pod replaced", "group": "new attempt"}
    end = "the next step" if recovery.steps_lost is not None else "running workers"
    print_text(f"killed      {result.killed}")
    print_text(f"recovery    {recovery.seconds:.1f} s to {end} ({level[recovery.level]})")
    print_text(f"steps lost  {describe_loss(recovery)}")
    print_text(f"verdict     {_describe_verdict(recovery)}")


def _describe_verdict(recovery: MeasuredRecovery) -> str:
    if recovery.steps_lost is None:
        return "workers restarted; whether they resumed from a checkpoint is unknown"
    if recovery.from_beginning:
        return (
            "restarted at step 0: no checkpoint was loaded. Save checkpoints and load the newest one at the start "
            "(docs/checkpoints.md), or kill after the first one (--after)"
        )
    return "recovered"


class PodTarget:
    """A job in a cluster."""

    def __init__(self, api: Api, name: str) -> None:
        self._api = api
        self._name = name
        self.summary = f"`ddp why {name}{api.option}`"

    def kill(self, rank: int) -> str:
        """Kill a rank's process, in the first pod that has it."""
        pods = list_running_pods(self._api, self._name)
        for pod in sorted(pods, key=lambda pod: pod.node != rank // pod.nproc):
            for line in execute_in_pod(self._api, pod, build_probe_command("kill", str(rank))):
                pid = json.loads(line).get("killed")
                if pid:
                    return f"rank {rank} (process {pid} in pod {pod.name})"
        raise _build_rank_error(self._name, rank, sum(pod.nproc for pod in pods))

    def check_rank(self, rank: int) -> None:
        """Do nothing: ``kill`` checks the rank, because a pod may not be running yet."""

    def samples(self) -> Iterator[Sample]:
        """Yield samples of pod 0, and of its replacements. Raises: RunEnded, ClientError."""
        samples: queue.Queue[Sample | ClientError | RunEnded] = queue.Queue()
        threading.Thread(target=self._watch, args=(samples,), daemon=True).start()
        while True:
            sample = samples.get()
            if isinstance(sample, ClientError | RunEnded):
                raise sample
            yield sample

    def _watch(self, samples: queue.Queue[Sample | ClientError | RunEnded]) -> None:
        try:
            while True:
                for pod in [pod for pod in list_running_pods(self._api, self._name) if pod.node == 0][-1:]:
                    port = find_metrics_port(get_job(self._api, self._name))
                    command = build_probe_command("watch", str(port), str(_POLL_SECONDS))
                    for line in execute_in_pod(self._api, pod, command):
                        samples.put(parse_sample(json.loads(line), time.monotonic(), pod.attempt))
                samples.put(Sample(time.monotonic()))
                self._check_phase()
                time.sleep(_POLL_SECONDS)
        except (ClientError, RunEnded) as error:
            samples.put(error)

    def _check_phase(self) -> None:
        """Raise RunEnded once the job has ended."""
        phase = (get_job(self._api, self._name).get("status") or {}).get("phase")
        if phase in ENDED_PHASES:
            raise RunEnded(phase)


class RunTarget:
    """A run on this machine."""

    def __init__(self, folder: RunFolder) -> None:
        """Check that the run restarts failed ranks. Raises: CommandError."""
        self._folder = folder
        self.summary = f"`ddp why {folder.path}`"
        recovery = self._read_job()["spec"].get("recovery") or {}
        if not recovery.get("maxRestarts") and not recovery.get("inPlaceRestarts"):
            raise CommandError(
                f"{folder.path}: spec.recovery.maxRestarts is 0, so the kill would end the run; start it with "
                "`ddp run --max-restarts 3`",
                ExitCode.FAILED,
            )

    def kill(self, rank: int) -> str:
        """Kill a rank's process."""
        pid = probe.kill(rank, str(self._folder.path.resolve()))
        if not pid:
            self.check_rank(rank)
            raise RunEnded(self._read_phase())
        return f"rank {rank} (process {pid})"

    def check_rank(self, rank: int) -> None:
        """Check that the job has this rank. Raises: CommandError."""
        job = parse_resource(self._read_job(), SCHEMA)
        count = job.spec.nodes * resolve_template(job).nproc
        if rank >= count:
            raise _build_rank_error(job.name, rank, count)

    def samples(self) -> Iterator[Sample]:
        """Yield samples of pod 0. Raises: RunEnded."""
        while True:
            port = self._find_metrics_port()
            page = probe.read_report(port) if port is not None else {}
            status = self._read_job().get("status") or {}
            yield parse_sample(page, time.monotonic(), int(status.get("attempt", 1)))
            if status.get("phase") in ENDED_PHASES or not self._folder.in_use:
                raise RunEnded(self._read_phase())
            time.sleep(_LOCAL_POLL_SECONDS)

    def _read_job(self) -> dict[str, Any]:
        return read_job(self._folder)

    def _read_phase(self) -> str:
        return str((self._read_job().get("status") or {}).get("phase"))

    def _find_metrics_port(self) -> int | None:
        """Return the metrics port of the newest pod 0; None before it listens."""
        file = self._folder.find_pod_file(0, "metrics-port")
        with suppress(OSError, ValueError):
            return int(file.read_text(encoding="utf-8")) if file is not None else None
        return None
