"""`ddp drill`: kill a rank of a running job, then measure how long the recovery takes and how many steps are lost.

In a cluster, pods/exec runs the probe in the job's containers. On this machine the probe runs beside `ddp run`, which
trains in a copy of the folder, so the user's files and checkpoints stay unchanged.
"""

import argparse
import itertools
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, NoReturn, Self

import yaml

from ddp_cli.client.api import Api, get_job, list_pods, open_exec
from ddp_cli.client.cluster import ClusterBackend
from ddp_cli.client.errors import ClientError
from ddp_cli.client.logs import LogPod, log_pod
from ddp_cli.client.packing.files import CannotPack, copy_files
from ddp_cli.client.workdir import Workdir, default_folder
from ddp_cli.commands import probe
from ddp_cli.commands.arguments import add_cluster_arguments, add_output_argument, open_client
from ddp_cli.commands.init import SCRIPT_SUFFIXES, find_script
from ddp_cli.commands.io import CommandError, ExitCode, integer, print_note, read_file
from ddp_cli.commands.recovery import MeasuredRecovery, Sample, measure, parse_sample
from ddp_cli.view.terminal import print_text
from ddp_operator.api import constants
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import parse_manifest, parse_resource
from ddp_operator.api.spec import MAX_RESTARTS
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.manifests.template import resolve_template

_POLL_SECONDS: Final = 0.2
_START_SECONDS: Final = 180.0
_LOCAL_POLL_SECONDS: Final = 0.1
_RUN: Final = "import sys; from ddp_cli.commands import main; sys.exit(main())"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "job",
        metavar="NAME|FILE",
        help="a running job of a cluster, or a job's YAML or script (train.py, run.sh) to run on this machine",
    )
    parser.add_argument("--kill", type=int, metavar="RANK", required=True, help="kill the process of this rank")
    parser.add_argument(
        "--after",
        type=int,
        default=3,
        metavar="STEPS",
        help="kill after this many steps; default: 3; 0: as soon as workers run, for a script that reports no steps",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="give up after this time; default: 600"
    )
    add_output_argument(parser)
    group = parser.add_argument_group("with a FILE, as for ddp run")
    group.add_argument("--nodes", type=integer(1), metavar="N", help="number of pods")
    group.add_argument("--procs", type=integer(1), metavar="N", help="worker processes per pod")
    group.add_argument("--cpu", action="store_true", help="use no GPUs")
    group.add_argument(
        "--workdir",
        type=Path,
        metavar="DIR",
        help="run FILE in a copy of this folder; default: the current folder, or the script's if that is elsewhere",
    )
    group.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATH",
        help="link this file or folder of DIR into the copy, such as data that git ignores; repeatable",
    )
    add_cluster_arguments(parser)
    parser.epilog = (
        "With a FILE, the drill starts a run, kills a rank, measures and stops the run. The run uses a temporary copy "
        "of the files that git would add, so your files and checkpoints do not change. Arguments after -- are passed "
        "to the script."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the drill and print the result. Raises: CommandError."""
    if arguments.kill < 0:
        raise CommandError("--kill: must be at least 0")
    if arguments.job == "-" or arguments.job.endswith((".yaml", ".yml", ".json", *SCRIPT_SUFFIXES)):
        with LocalRun.of(arguments) as run:
            result = drill(run, arguments.kill, after=arguments.after, timeout=arguments.timeout)
    else:
        _refuse_run_options(arguments)
        job = open_client(arguments).get(arguments.job)
        phase = job.phase
        if phase != "Running":
            raise CommandError(f"{arguments.job} is {phase}; a drill needs a Running job", ExitCode.FAILED)
        assert isinstance(job.backend, ClusterBackend)
        target = PodTarget(job.backend.api, arguments.job)
        result = drill(target, arguments.kill, after=arguments.after, timeout=arguments.timeout)
    print_result(result, arguments.output)
    return ExitCode.OK


def _refuse_run_options(arguments: argparse.Namespace) -> None:
    """Refuse the options of a FILE for a job in a cluster. Raises: CommandError."""
    for name in ("nodes", "procs", "cpu", "workdir", "include", "extra"):
        if getattr(arguments, name):
            option = "--" if name == "extra" else f"--{name}"
            raise CommandError(
                f"{option} is only for a FILE to run on this machine, and {arguments.job} names a job in a cluster; "
                "leave it out"
            )


class RunEnded(Exception):
    """The job ended during the drill. ``phase``: its last phase."""

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.phase = phase


class DrillResult(NamedTuple):
    """The result of a drill: the killed process, such as "rank 1 (process 42)", and the recovery."""

    killed: str
    recovery: MeasuredRecovery


def drill(
    target: "LocalRun | PodTarget",
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
        f"the job succeeded before {reached}, so no rank was killed; train for longer (put arguments of the script "
        f"after --){smaller}. For a script that reports no steps, use --after 0"
    )


def _explain_late_end(end: RunEnded, summary: str) -> str:
    """Return why no recovery was measured after the kill, and what to do."""
    if end.phase == "Succeeded":
        return "the job succeeded before it reported a step after the kill; train for longer, or kill earlier (--after)"
    return f"the job did not recover and ended ({end.phase}); see {summary} for the cause"


def _wait_for_steps(
    target: "LocalRun | PodTarget",
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
    print_text(f"steps lost  {_describe_loss(recovery)}")
    print_text(f"verdict     {_describe_verdict(recovery)}")


def _describe_loss(recovery: MeasuredRecovery) -> str:
    lost = recovery.steps_lost
    if lost is None:
        return "unknown (--after 0)"
    if recovery.from_beginning:
        return f"all {lost} (at step {recovery.step_before}, restarted at step 0)"
    earliest = recovery.earliest_resume
    latest = recovery.latest_resume
    if earliest == latest:
        return f"{lost} (at step {recovery.step_before}, resumed from {earliest})"
    return (
        f"at most {lost} (at step {recovery.step_before}, resumed between {earliest} and {latest}: the log has every "
        f"{recovery.interval}th step)"
    )


def _describe_verdict(recovery: MeasuredRecovery) -> str:
    if recovery.steps_lost is None:
        return "workers restarted; whether they resumed from a checkpoint is unknown"
    if recovery.from_beginning:
        return (
            "restarted at step 0: no checkpoint was loaded. Save checkpoints and load the newest one at the start "
            "(docs/checkpoints.md), or kill after the first one (--after)"
        )
    return "recovered"


def build_probe_command(*words: str) -> list[str]:
    """Return the command line that runs the probe in a container."""
    source = resources.files("ddp_cli.commands").joinpath("probe.py").read_text(encoding="utf-8")
    return ["python3", "-c", source, *words]


class PodTarget:
    """A job in a cluster."""

    def __init__(self, api: Api, name: str, execute: Callable[..., Iterator[str]] | None = None) -> None:
        self._api = api
        self._name = name
        self._execute = execute or execute_in_pod
        self.summary = f"`ddp why {name}{api.option}`"

    def kill(self, rank: int) -> str:
        """Kill a rank's process, in the first pod that has it."""
        pods = self._list_running_pods()
        for pod in sorted(pods, key=lambda pod: pod.node != rank // pod.nproc):
            for line in self._execute(self._api, pod, build_probe_command("kill", str(rank))):
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
                for pod in [pod for pod in self._list_running_pods() if pod.node == 0][-1:]:
                    metrics = get_job(self._api, self._name)["spec"].get("metrics") or {}
                    port = metrics.get("port", constants.DEFAULT_METRICS_PORT)
                    for line in self._execute(
                        self._api, pod, build_probe_command("watch", str(port), str(_POLL_SECONDS))
                    ):
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

    def _list_running_pods(self) -> list[LogPod]:
        alive = [pod for pod in list_pods(self._api, self._name) if "deletionTimestamp" not in pod["metadata"]]
        pods = [log_pod(pod) for pod in alive if (pod.get("status") or {}).get("phase") == "Running"]
        return sorted(pods, key=lambda pod: (pod.attempt, pod.node))


def execute_in_pod(api: Api, pod: LogPod, command: list[str]) -> Iterator[str]:
    """Yield the lines that a command prints in a pod, until it or the pod ends. Raises: CommandError."""
    from kubernetes import client
    from websocket import WebSocketException

    try:
        socket = open_exec(api, pod.name, command, container=pod.container, stdin=False, stderr=True)
    except client.ApiException as error:
        if error.status in (403, 401):
            raise CommandError(
                f"ddp drill needs the permission pods/exec in namespace {api.namespace} ({error.reason}); "
                "ask the cluster's administrator",
                ExitCode.CLUSTER,
            ) from None
        return  # the pod was deleted or is not ready yet
    try:
        while socket.is_open() or socket.peek_stdout():
            line = socket.readline_stdout(timeout=5)
            if line:
                yield line
    except WebSocketException:
        return
    finally:
        socket.close()


def _set_cluster_restarts(text: str) -> str:
    """Return the file with the default maxRestarts of a cluster, because the default of `ddp run` is 0."""
    try:
        job = parse_manifest(text).job
    except InvalidManifest:
        return text  # `ddp run` reports the errors
    documents = load_documents(text)
    limits = {"maxRestarts": job.spec.recovery.max_restarts}
    for document in documents:
        if document.get("kind") == constants.KIND:
            spec = document["spec"]
            spec["recovery"] = limits | (spec.get("recovery") or {})
    return yaml.safe_dump_all(documents)


class LocalRun:
    """A run of a job's YAML or of a script on this machine. Its output is copied to stderr until the drill stops it.

    It runs in a copy of ``folder``, which is deleted afterwards.
    """

    summary = "its summary above"

    def __init__(
        self,
        file: str,
        extra: Sequence[str] = (),
        *,
        folder: Path | None = None,
        include: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ddp-drill-")
        self._file = file
        self._source = folder
        self._include = include
        self._runs = Path(self._folder.name) / "runs"
        self._work = Path(self._folder.name) / "folder"
        self._job = Path(self._folder.name) / "job.yaml"
        self._command = [sys.executable, "-P", "-c", _RUN, "run", self._target(), "--plain", "--name", "drill"]
        self._command += ["--runs-dir", str(self._runs), *options]
        if self._is_script:
            self._command += ["--max-restarts", str(MAX_RESTARTS)]
        if extra:
            self._command += ["--", *extra]
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """Return the run that the arguments name. Raises: ClientError."""
        options = ["--cpu"] if arguments.cpu else []
        for name in ("nodes", "procs"):
            if getattr(arguments, name) is not None:
                options += [f"--{name}", str(getattr(arguments, name))]
        script = find_script(arguments.job, None)
        folder = arguments.workdir or default_folder(script.path if script else None)
        return cls(arguments.job, arguments.extra, folder=folder, include=arguments.include, options=options)

    @property
    def _is_script(self) -> bool:
        return self._file.endswith(SCRIPT_SUFFIXES)

    def _target(self) -> str:
        """Return the FILE of `ddp run`: the script's path in the copy, or the YAML."""
        if not self._is_script:
            return str(self._job)
        return Workdir(self._source).place(self._file) if self._source is not None else self._file

    def __enter__(self) -> Self:
        try:
            if not self._is_script:
                self._job.write_text(_set_cluster_restarts(read_file(self._file)))
            self._copy_folder()
        except BaseException:
            self._folder.cleanup()
            raise
        self._process = subprocess.Popen(
            self._command, cwd=self._work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._copy_output, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    def _copy_folder(self) -> None:
        """Copy the user's folder. Raises: CommandError."""
        self._work.mkdir()
        if self._source is None:
            return
        try:
            count = copy_files(self._source, self._work, self._include)
        except CannotPack as error:
            raise CommandError(str(error)) from None
        except OSError as error:
            raise CommandError(
                f"{self._source}: cannot be copied to {self._work} ({error.strerror}); choose another --workdir"
            ) from None
        print_note(
            f"running in a copy of {self._source} ({count} files), without what git ignores; --include PATH adds a path"
        )

    def _copy_output(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if not self._stopping:  # the result of the drill is printed last
                    print_text(line.decode("utf-8", "replace"), file=sys.stderr, end="")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        self._stopping = process.poll() is None
        for _ in range(2):  # the second signal kills the pods at once
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(_LOCAL_POLL_SECONDS)
        process.wait()
        self._reader.join()
        self._folder.cleanup()

    def samples(self) -> Iterator[Sample]:
        """Yield samples of pod 0. Raises: RunEnded."""
        assert self._process is not None
        while True:
            port = self._metrics_port()
            page = probe.read_report(port) if port is not None else {}
            yield parse_sample(page, time.monotonic(), self._attempt())
            if self._process.poll() is not None:
                self._raise_end()
            time.sleep(_LOCAL_POLL_SECONDS)

    def kill(self, rank: int) -> str:
        """Kill a rank's process among the descendants of the run."""
        assert self._process is not None
        pid = probe.kill(rank, self._process.pid)
        if not pid:
            self.check_rank(rank)
            self._raise_end()
        return f"rank {rank} (process {pid})"

    def check_rank(self, rank: int) -> None:
        """Check that the job has this rank. Raises: CommandError."""
        resource = self._read_resource()
        if "spec" in resource:
            job = parse_resource(resource)
            count = job.spec.nodes * resolve_template(job).nproc
            if rank >= count:
                raise CommandError(
                    f"{_build_rank_error('the job', rank, count)}; for more ranks, use --nodes or --procs"
                )

    def _raise_end(self) -> NoReturn:
        """Raise RunEnded, once the run has written how the job ended and printed its summary."""
        assert self._process is not None
        code = self._process.wait()
        self._reader.join()
        phase = str((self._read_resource().get("status") or {}).get("phase") or "Rejected")
        if phase not in ENDED_PHASES:
            phase = f"ddp run: exit code {code}"
        raise RunEnded(phase)

    def _read_resource(self) -> dict[str, Any]:
        """Return the job as the run last wrote it; empty before it has."""
        for path in self._runs.glob("drill-*/status.yaml"):
            return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        return {}

    def _metrics_port(self) -> int | None:
        """Return the metrics port of the newest pod 0; None before it listens."""
        files = self._runs.glob("drill-*/pods/*/metrics-port")
        candidates = [file for file in files if re.search(r"-0-[a-z0-9]+$", file.parent.name)]
        with suppress(OSError, ValueError):
            newest = max(candidates, key=lambda file: file.stat().st_mtime_ns, default=Path())
            return int(newest.read_text(encoding="utf-8"))
        return None

    def _attempt(self) -> int:
        return int((self._read_resource().get("status") or {}).get("attempt", 1))
