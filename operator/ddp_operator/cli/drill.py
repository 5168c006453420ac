"""`ddp drill`: kill a rank of a running job, then measure how long the recovery takes and how many steps are lost.

In a cluster the probe runs in the job's own containers, through pods/exec; on this machine beside `ddp run`.
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
from typing import IO, Final, Self

import yaml

from ddp_operator import constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import load_documents, parse_manifest
from ddp_operator.cli import probe
from ddp_operator.cli.arguments import add_cluster_arguments, add_output_argument, open_client
from ddp_operator.cli.io import CommandError, ExitCode, read_file
from ddp_operator.client.api import Api, get_job, list_pods
from ddp_operator.client.cluster import ClusterBackend
from ddp_operator.client.errors import ClientError
from ddp_operator.client.logs import LogPod, log_pod
from ddp_operator.recovery import Recovery, Sample, measure, parse_sample

_POLL_SECONDS: Final = 0.2
_START_SECONDS: Final = 180.0
_LOCAL_POLL_SECONDS: Final = 0.1
_RUN: Final = "import sys; from ddp_operator.cli import main; sys.exit(main())"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("job", metavar="NAME|FILE", help="a running job, or a job's YAML to run on this machine")
    parser.add_argument("--kill", type=int, metavar="RANK", required=True, help="the rank whose process to kill")
    parser.add_argument(
        "--after",
        type=int,
        default=3,
        metavar="STEPS",
        help="kill after this many steps; default: 3; use 0 for a script that reports no steps",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="give up after this time; default: 600"
    )
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = "A FILE is run (arguments after -- go to the script), drilled and stopped."


def run(arguments: argparse.Namespace) -> int:
    """Run the drill and print the result. Raises: CommandError."""
    if arguments.kill < 0:
        raise CommandError("--kill: must be at least 0")
    if arguments.job == "-" or arguments.job.endswith((".yaml", ".yml", ".json")):
        with LocalRun(arguments.job, arguments.extra) as local:
            who, found = drill(local, arguments.kill, after=arguments.after, timeout=arguments.timeout)
    else:
        job = open_client(arguments).get(arguments.job)
        phase = job.phase
        if phase != "Running":
            raise CommandError(f"{arguments.job} is {phase}; a drill needs a Running job", ExitCode.FAILED)
        assert isinstance(job.backend, ClusterBackend)
        target = PodTarget(job.backend.api, arguments.job)
        who, found = drill(target, arguments.kill, after=arguments.after, timeout=arguments.timeout)
    report(arguments, who, found)
    return ExitCode.OK


def drill(
    target: "LocalRun | PodTarget",
    rank: int,
    *,
    after: int,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    start: float = _START_SECONDS,
) -> tuple[str, Recovery]:
    """Wait until the job trains, kill, and measure. Return what was killed, and the recovery. Raises: CommandError."""
    samples = target.samples()
    before = _wait_for_steps(samples, after, clock() + start)
    who = target.kill(rank)
    killed_at = clock()
    found = measure(before, killed_at, itertools.takewhile(lambda s: s.time < killed_at + timeout, samples))
    if found is None:
        raise CommandError(f"killed {who}; training did not resume within {timeout:.0f} s", ExitCode.FAILED)
    return who, found


def _wait_for_steps(samples: Iterator[Sample], after: int, until: float) -> Sample:
    for sample in samples:
        if after and (sample.steps_of_process or 0) >= after:
            return sample
        if not after and sample.running:
            return replace(sample, step=None, steps_of_process=None)
        if sample.time > until:
            break
    raise CommandError(
        f"rank 0 has not completed {after} steps; a drill needs a job that trains "
        "(if the script reports no steps, use --after 0)",
        ExitCode.FAILED,
    )


def report(arguments: argparse.Namespace, who: str, found: Recovery) -> None:
    """Print the result."""
    if arguments.output == "json":
        parts = {
            "killed": who,
            "recoverySeconds": round(found.seconds, 2),
            "level": found.level,
            "stepBefore": found.step_before,
            "resumedFrom": found.resumed_from,
            "stepsLost": found.steps_lost,
        }
        print(json.dumps(parts, indent=2))
        return
    level = {"process": "workers restarted in the same pods", "pod": "pod replaced", "group": "new attempt"}
    print(f"killed      {who}")
    to = "the next step" if found.steps_lost is not None else "running workers"
    print(f"recovery    {found.seconds:.1f} s to {to} ({level[found.level]})")
    if found.steps_lost is None:
        print("steps lost  unknown (--after 0)")
    else:
        print(f"steps lost  {found.steps_lost} (at step {found.step_before}, resumed from {found.resumed_from})")
    print("verdict     recovered")


def probe_command(*words: str) -> list[str]:
    """Return the command line that runs the probe in a container."""
    source = resources.files("ddp_operator.cli").joinpath("probe.py").read_text(encoding="utf-8")
    return ["python3", "-c", source, *words]


class PodTarget:
    """A job in a cluster."""

    def __init__(self, api: Api, name: str, execute: Callable[..., Iterator[str]] | None = None) -> None:
        self._api = api
        self._name = name
        self._execute = execute or execute_in_pod

    def kill(self, rank: int) -> str:
        """Kill a rank's process, in the first pod that has it."""
        pods = self._running()
        for pod in sorted(pods, key=lambda pod: pod.node != rank // pod.nproc):
            for line in self._execute(self._api, pod, probe_command("kill", str(rank))):
                pid = json.loads(line).get("killed")
                if pid:
                    return f"rank {rank} (process {pid} in pod {pod.name})"
        last = sum(pod.nproc for pod in pods) - 1
        raise CommandError(f"--kill: {self._name} has no rank {rank}; its ranks are 0 to {last}")

    def samples(self) -> Iterator[Sample]:
        """Yield samples of pod 0, and of its replacement once it is gone."""
        found: queue.Queue[Sample | ClientError] = queue.Queue()
        threading.Thread(target=self._watch, args=(found,), daemon=True).start()
        while True:
            sample = found.get()
            if isinstance(sample, ClientError):
                raise sample
            yield sample

    def _watch(self, found: queue.Queue[Sample | ClientError]) -> None:
        try:
            while True:
                for pod in [pod for pod in self._running() if pod.node == 0][-1:]:
                    metrics = get_job(self._api, self._name)["spec"].get("metrics") or {}
                    port = metrics.get("port", constants.DEFAULT_METRICS_PORT)
                    for line in self._execute(self._api, pod, probe_command("watch", str(port), str(_POLL_SECONDS))):
                        found.put(parse_sample(json.loads(line), time.monotonic(), pod.attempt))
                found.put(Sample(time.monotonic()))
                time.sleep(_POLL_SECONDS)
        except ClientError as error:
            found.put(error)

    def _running(self) -> list[LogPod]:
        alive = [pod for pod in list_pods(self._api, self._name) if "deletionTimestamp" not in pod["metadata"]]
        pods = [log_pod(pod) for pod in alive if (pod.get("status") or {}).get("phase") == "Running"]
        return sorted(pods, key=lambda pod: (pod.attempt, pod.node))


def execute_in_pod(api: Api, pod: LogPod, command: list[str]) -> Iterator[str]:
    """Yield the lines that a command prints in a pod, until it or the pod ends. Raises: CommandError."""
    from kubernetes import client
    from kubernetes.stream import stream
    from websocket import WebSocketException

    # stream() replaces a method of its client while it runs, so it gets a client of its own.
    core = client.CoreV1Api(client.ApiClient(api.client.configuration))
    options = {"container": pod.container, "stdin": False, "stdout": True, "stderr": True, "tty": False}
    try:
        execute = core.connect_get_namespaced_pod_exec
        socket = stream(execute, pod.name, api.namespace, command=command, _preload_content=False, **options)
    except client.ApiException as error:
        if error.status in (403, 401):
            raise CommandError(
                f"needs pods/exec in namespace {api.namespace}: {error.reason}", ExitCode.CLUSTER
            ) from None
        return  # the pod is gone, or not ready yet
    try:
        while socket.is_open() or socket.peek_stdout():
            line = socket.readline_stdout(timeout=5)
            if line:
                yield line
    except WebSocketException:
        return
    finally:
        socket.close()


def _with_recovery(text: str) -> str:
    """Return the file with a cluster's default restarts; `ddp run` restarts only what the file asks for."""
    try:
        job = parse_manifest(text).job
    except InvalidManifest:
        return text  # `ddp run` reports the errors
    documents = load_documents(text)
    for spec in (one["spec"] for one in documents if one.get("kind") == constants.KIND):
        limits = {"maxRestarts": job.spec.recovery.max_restarts}
        spec["recovery"] = limits | (spec.get("recovery") or {})
    return yaml.safe_dump_all(documents)


class LocalRun:
    """A run of a job's YAML on this machine. Its output goes to stderr, up to its stop on exit."""

    def __init__(self, file: str, extra: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ddp-drill-")
        self._file, self._job = file, Path(self._folder.name) / "job.yaml"
        options = ["run", str(self._job), "--plain", "--name", "drill", "--runs-dir", self._folder.name]
        options += ["--", *extra] if extra else []
        self._command = [sys.executable, "-P", "-c", _RUN, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def __enter__(self) -> Self:
        self._job.write_text(_with_recovery(read_file(self._file)))
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    def _pass_on(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if not self._stopping:  # the drill's own words come last, not those of a run that was interrupted
                    sys.stderr.write(line.decode("utf-8", "replace"))

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
        """Yield pod 0's page. Raises: CommandError, once the run has ended."""
        assert self._process is not None
        while True:
            port = self._metrics_port()
            page = probe.read_page(port) if port is not None else {}
            yield parse_sample(page, time.monotonic(), self._attempt())
            if self._process.poll() is not None:
                raise CommandError("the run ended before the drill was over; its summary is above", ExitCode.FAILED)
            time.sleep(_LOCAL_POLL_SECONDS)

    def kill(self, rank: int) -> str:
        """Kill a rank's process among the descendants of the run."""
        assert self._process is not None
        pid = probe.kill(rank, self._process.pid)
        if not pid:
            raise CommandError(f"--kill: there is no rank {rank} in this run")
        return f"rank {rank} (process {pid})"

    def _metrics_port(self) -> int | None:
        """Return the metrics port of the newest pod 0; None before it listens."""
        files = Path(self._folder.name).glob("drill-*/pods/*/metrics-port")
        own = [file for file in files if re.search(r"-0-[a-z0-9]+$", file.parent.name)]
        with suppress(OSError, ValueError):
            return int(max(own, key=lambda file: file.stat().st_mtime_ns, default=Path()).read_text(encoding="utf-8"))
        return None

    def _attempt(self) -> int:
        for path in Path(self._folder.name).glob("drill-*/status.yaml"):
            status = yaml.safe_load(path.read_text(encoding="utf-8")).get("status") or {}
            return int(status.get("attempt", 1))
        return 1
