"""The environment of a drill: a folder, a job under `ddp run`, the record of its steps, and checks for the end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.drills.core import DrillOutcome, Perished
from tests.support import ROOT
from tests.support.counts import read_counts
from tests.support.object_store import PACKAGES, ObjectStore

TRAINEE = Path(__file__).with_name("trainee.py")
PATIENCE = float(os.environ.get("DDP_DRILL_PATIENCE", "240"))
"""Seconds after which an expected event counts as missing."""
MARK = "DDP_DRILL"
STEPS = 40
EVERY = 5
STRIKE = 12
"""Steps of the job, steps between checkpoints, and the step (from 0) of most faults."""
PAUSE = 0.15
"""Seconds after each step: long enough for the operator to see a restart in the same pods before the job ends."""
ARGUMENTS = (
    "--preset", "digits-resnet", "--model-width", "8", "--batch-size", "16", "--epochs", "1",
    "--max-steps", str(STEPS), "--checkpoint-every-steps", str(EVERY), "--checkpoint-every-epochs", "0",
    "--log-every", "5",
)  # fmt: skip
_PATH = os.pathsep.join([str(ROOT), str(ROOT / "operator"), str(ROOT / "trainer")])
_FETCH = """
import sys
from ddp_pod.features.mirror.snapshots import SnapshotStore
from ddp_pod.transfer.sources import open_storage
SnapshotStore(*open_storage(sys.argv[1]), attempt=0, run_id="drill-0", keep=1).fetch_newest(sys.argv[2])
"""
_DDP = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"
RECOVERY = {"maxRestarts": 3}
CHECKPOINT = {"path": "/ckpt", "claimName": "drill", "graceSeconds": 20, "memoryInterval": 0}
"""On the disk only: the drills of ``memory`` have copies in memory too."""


@dataclass(frozen=True)
class WitnessStep:
    """One recorded step."""

    time: float
    attempt: int
    restart: int
    pid: int
    step: int


@dataclass
class Session:
    """Shared by all drills of one call: a folder with every checkpoint of an uninterrupted run."""

    folder: Path
    reference: Path | None = None
    store: ObjectStore | None = None
    """The URL for checkpoints, if they are not on a claim."""


class Scene:
    """One run of one drill."""

    def __init__(self, session: Session, name: str, *, fast: bool = False) -> None:
        self.session = session
        self.name = name
        self.fast = fast
        self.folder = session.folder / f"{name}-{uuid.uuid4().hex[:6]}"
        self.witness = self.folder / "witness"
        self.temporary = self.folder / "tmp"
        for folder in (self.folder, self.witness, self.temporary):
            folder.mkdir()
        self.mark = uuid.uuid4().hex
        self.marks = {MARK: self.mark}
        self.runs: list[Running] = []
        self.env: dict[str, str] = {}
        self._undo = contextlib.ExitStack()

    # Start

    def start(
        self,
        *,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        program: str | None = None,
        within: Sequence[str] = (),
        **spec: Any,
    ) -> Running:
        """Start `ddp run` on the job; a second run in the same scene resumes with the same claims.

        ``program``: a script in its place. ``within``: a command in front of it, which it replaces.
        """
        if self.session.store is not None:
            checkpoint = {"path": "/ckpt", "url": self.url, "graceSeconds": 20, "memoryInterval": 0}
            # The store needs time to upload saved checkpoints before the fault.
            env = {**self.access(), "DRILL_PAUSE": str(4 * PAUSE), **(env or {})}
            spec = {"checkpoint": checkpoint, **spec}
        text = build_manifest(self.witness, [*ARGUMENTS, *arguments], env or {}, spec)
        running = Running(self, text, [*within, sys.executable, *([program] if program else ["-P", "-c", _DDP])])
        self.runs.append(running)
        return running

    def on_leaving(self, undo: Callable[[], object]) -> None:
        """Register a function that runs at the end of the drill in any case."""
        self._undo.callback(undo)

    @property
    def url(self) -> str:
        """The drill's own folder in the store."""
        assert self.session.store is not None
        return f"{self.session.store.url}/{self.folder.name}"

    @property
    def kept(self) -> str:
        """The name of the checkpoints' location in messages."""
        return "claim drill" if self.session.store is None else self.url

    def access(self) -> dict[str, str]:
        """Return the environment of a process that uses the store."""
        assert self.session.store is not None
        return {**self.session.store.credentials, "PYTHONPATH": os.pathsep.join([_PATH, str(PACKAGES)])}

    def environ(self) -> dict[str, str]:
        """Return the environment of all processes of the drill."""
        return os.environ | {"PYTHONPATH": _PATH, "TMPDIR": str(self.temporary), **self.marks, **self.env}

    # The record of steps

    def steps(self, rank: int = 0) -> list[WitnessStep]:
        """Return the steps that a rank has completed so far."""
        try:
            lines = (self.witness / f"steps-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines if len(line.split()) == 5]
        return [WitnessStep(float(t), int(a), int(r), int(p), int(s)) for t, a, r, p, s in words]

    def until(self, probe: Callable[[], Any], event: str, *, alive: Running | None = None) -> Any:
        """Wait until ``probe()`` is true and return it; ``alive`` must run meanwhile."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = alive is not None and alive.process.poll() is not None  # read first: both may happen meanwhile
            if result := probe():
                return result
            if alive is not None and ended:
                raise Perished(f"the run ended before {event}\n{alive.output}")
            if time.monotonic() > deadline:
                raise Perished(f"never: {event}\n{self.runs[-1].output if self.runs else ''}")
            time.sleep(0.01)

    def until_step(self, run: Running, step: int = STRIKE, rank: int = 0) -> list[WitnessStep]:
        """Wait until a rank has completed this many steps, and the store, if any, has one checkpoint."""
        if self.session.store is not None:
            self.until(lambda: run.said("uploaded the checkpoints"), "a checkpoint in the store", alive=run)
        return list(self.until(lambda: _reached(self.steps(rank), step), f"step {step} of rank {rank}", alive=run))

    def recovery(self, struck: float, *, floor: str, waits: float = 0.0, note: str = "") -> DrillOutcome:
        """Return the steps that rank 0 lost and the seconds until its first new step after ``struck`` (monotonic)."""
        steps = self.steps()
        before = [step for step in steps if step.time <= struck]
        pids = {step.pid for step in before}
        after = [step for step in steps if step.time > struck and step.pid not in pids]
        old = [step for step in steps if step.pid in pids]
        if not after:
            raise Perished("no step was made after the fault")
        lost = max(step.step for step in old) + 1 - after[0].step if old else 0
        return DrillOutcome(max(0, lost), after[0].time - struck, floor, waits, note)

    # Checks

    def check_state(self, step: int = STEPS) -> None:
        """Check that the newest checkpoint is of this step and bitwise equals that of an uninterrupted run."""
        assert self.session.reference is not None, "no reference was made"
        saved = self.folder / "ddp-runs" / "claims" / "drill"
        if self.session.store is not None:
            saved = self.folder / "fetched"
            saved.mkdir()
            line = [sys.executable, "-P", "-c", _FETCH, self.url, str(saved)]
            subprocess.run(line, env=self.environ() | self.access(), check=True)
        mine = read_newest_state(saved, step)
        (path,) = self.session.reference.glob(f"step-{step:09d}*.pt")
        difference = compare(mine, load_state(path))
        if difference:
            raise Perished(f"the state of step {step} differs from an uninterrupted run's: {difference}")

    def check_nothing_left(self, *, temporary: bool = True) -> None:
        """Check that no process and no listening port remains, and, if requested, no temporary file."""
        ports = {port for run in self.runs for port in run.ports}
        deadline = time.monotonic() + PATIENCE / 4
        while (remaining := find_left(self.mark, ports)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if remaining:
            raise Perished("left: " + "; ".join(remaining))
        if not temporary:
            return
        strays = [path for path in self.temporary.rglob("*") if not path.is_dir()]
        strays += list((self.folder / "ddp-runs").rglob("*.tmp"))
        strays += [path for path in (self.folder / "ddp-runs").glob("*/pods/*/runtime/*/*") if path.is_fifo()]
        if strays:
            raise Perished(f"temporary files are left: {', '.join(str(path) for path in strays[:5])}")

    def close(self) -> None:
        """Kill remaining processes, and revert changes of the machine."""
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait()
        for pid in find_marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._undo.close()


class Running:
    """One `ddp run`."""

    def __init__(self, scene: Scene, text: str, command: Sequence[str]) -> None:
        self.scene = scene
        self.folder = scene.folder
        number = len(scene.runs)
        (self.folder / f"job-{number}.yaml").write_text(text)
        self._output = self.folder / f"output-{number}.txt"
        runs = self.folder / "ddp-runs"
        self._before = set(runs.iterdir()) if runs.exists() else set()
        self.began = time.monotonic()
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "run", f"job-{number}.yaml", "--plain"],
                cwd=self.folder,
                env=scene.environ(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.ports: set[int] = set()

    @property
    def output(self) -> str:
        """All its output, and the end of the pods' logs."""
        words = self._output.read_text(errors="replace")
        return words + "".join(f"\n--- {name} ---\n{text[-3000:]}" for name, text in self.logs().items())

    @property
    def run_folder(self) -> Path | None:
        """Its run folder, once it exists."""
        runs = self.folder / "ddp-runs"
        added = set(runs.iterdir()) - self._before if runs.exists() else set()
        result = [path for path in added if path.name not in ("claims", ".gitignore")]
        return result[0] if result else None

    def logs(self) -> dict[str, str]:
        """Return the pods' logs by name."""
        folder = self.run_folder
        result = sorted((folder / "logs").glob("*.log")) if folder else []
        return {path.stem: path.read_text(errors="replace") for path in result}

    def said(self, words: str) -> bool:
        """Return whether a pod has written this text."""
        return any(re.search(words, text) for text in self.logs().values())

    def status(self) -> dict[str, Any]:
        """Return the status in status.yaml."""
        assert self.run_folder is not None
        return dict(yaml.safe_load((self.run_folder / "status.yaml").read_text())["status"])

    def report(self) -> str:
        """Return the page of `ddp report` for it."""
        assert self.run_folder is not None
        line = [sys.executable, "-P", "-c", _DDP, "report", str(self.run_folder)]
        subprocess.run(line, cwd=self.folder, env=self.scene.environ(), check=True, stdout=subprocess.DEVNULL)
        return (self.run_folder / "report.html").read_text()

    def note_ports(self) -> None:
        """Record the pods' ports, to check later that no process listens on them."""
        for pid in find_marked(self.scene.mark):
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections("tcp")
                self.ports |= {
                    connection.laddr.port
                    for connection in connections
                    if connection.laddr and connection.status == psutil.CONN_LISTEN
                }

    def tree(self) -> ProcessTree:
        """Return its processes by role."""
        self.note_ports()
        return ProcessTree.of(self.process.pid)

    def end(self, code: int = 0) -> dict[str, Any]:
        """Wait for the end, check the exit code, and return the status."""
        try:
            result = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Perished(f"the run does not end\n{self.output}") from None
        if result != code:
            raise Perished(f"the run ended with {result}, not {code}\n{self.output}")
        return self.status()

    def succeed(self, *, restarts: int | None = None, in_place: int | None = None) -> dict[str, Any]:
        """Wait for success. Check the numbers of ``restarts`` of the group and of those in place."""
        status = self.end()
        seen = read_counts(status)
        if restarts is not None and seen["total"] != restarts:
            raise Perished(f"{seen['total']} restarts of the group, not {restarts}\n{self.output}")
        if in_place is not None and seen["inPlace"] != in_place:
            raise Perished(f"{seen['inPlace']} restarts in the same pods, not {in_place}\n{self.output}")
        level = status["lastRestart"].get("level") if in_place or restarts else None
        if (level, seen["counted"]) != ("SamePods", in_place) and in_place and restarts == 0:
            raise Perished(f"status does not say that the pods were kept, and what it counts: {status}\n{self.output}")
        return status


@dataclass(frozen=True)
class ProcessTree:
    """Processes of a run by pod: launchers, agents and workers; the store of pod 0."""

    launchers: dict[int, int]
    agents: dict[int, int]
    workers: dict[int, int]

    @classmethod
    def of(cls, run: int) -> ProcessTree:
        """Read the children of `ddp run`."""
        launchers: dict[int, int] = {}
        agents: dict[int, int] = {}
        workers: dict[int, int] = {}
        for child in psutil.Process(run).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                env = child.environ()
                index = env.get("JOB_COMPLETION_INDEX")
                if index is None or not any(word.endswith("launcher.py") for word in words):
                    continue
                if "worker" in words:
                    workers[int(index)] = child.pid
                elif child.ppid() == run:
                    launchers[int(index)] = child.pid
        for number, pid in launchers.items():
            # Of the launcher's children the agent is the one with the worker, or the oldest.
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(pid).children()
                having = [c.pid for c in children if workers.get(number) in {g.pid for g in c.children()}]
                agents[number] = (having or [c.pid for c in children])[0]
        return cls(launchers, agents, workers)

    @property
    def all(self) -> list[int]:
        """Every process in this record."""
        return [*self.launchers.values(), *self.agents.values(), *self.workers.values()]


def build_manifest(witness: Path, arguments: Sequence[str], env: Mapping[str, str], spec: Mapping[str, Any]) -> str:
    """Return the YAML of the drills' job; ``spec`` replaces parts of it."""
    names = {"DRILL_FOLDER": str(witness), "DRILL_PAUSE": str(PAUSE), "OMP_NUM_THREADS": "1", **env}
    container = {
        "name": "trainer",
        "image": "example/torch",
        "command": ["python", str(TRAINEE)],
        "args": list(arguments),
        "env": [{"name": name, "value": value} for name, value in names.items()],
    }
    body = {
        "nodes": 2,
        "recovery": RECOVERY,
        "checkpoint": CHECKPOINT,
        "template": {"spec": {"containers": [container]}},
        **spec,
    }
    head = {"apiVersion": "ddp-operator.dev/v1alpha1", "kind": "DDPTrainingJob", "metadata": {"name": "drill"}}
    return yaml.safe_dump({**head, "spec": body})


def read_newest_state(folder: Path, step: int) -> Any:
    """Return the newest checkpoint of a folder. Raises: Perished, where it is not of this step."""
    manifests = [json.loads(path.read_text()) for path in folder.glob("step-*.json")]
    if not manifests:
        raise Perished("there is no checkpoint")
    newest = max(manifests, key=lambda item: (item["step"], item["attempt"]))
    if newest["step"] != step:
        raise Perished(f"the last checkpoint is of step {newest['step']}, not {step}")
    return load_state(folder / newest["file"])


def load_state(path: Path) -> Any:
    """Return the state of a checkpoint."""
    import torch

    return torch.load(path, weights_only=True)


def compare(mine: Any, other: Any, path: str = "state") -> str:
    """Return where two states differ, bit by bit; empty where they do not."""
    import torch

    if isinstance(mine, torch.Tensor):
        same = isinstance(other, torch.Tensor) and mine.dtype == other.dtype and torch.equal(mine, other)
        return "" if same else path
    if isinstance(mine, dict):
        if not isinstance(other, dict) or mine.keys() != other.keys():
            return path
        return next((result for key in mine if (result := compare(mine[key], other[key], f"{path}.{key}"))), "")
    if isinstance(mine, list | tuple):
        if len(mine) != len(other):
            return path
        pairs = enumerate(zip(mine, other, strict=True))
        return next((result for i, (a, b) in pairs if (result := compare(a, b, f"{path}[{i}]"))), "")
    return "" if mine == other else path


def find_marked(mark: str) -> list[int]:
    """Return the living processes that inherited a drill's mark."""
    expected = f"{MARK}={mark}".encode()
    results = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if expected in (entry / "environ").read_bytes().split(b"\0"):
                    results.append(int(entry.name))
    return results


def describe_process(pid: int) -> str:
    """Return a short description of a process."""
    with contextlib.suppress(psutil.Error):
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:120]}"
    return str(pid)


def find_left(mark: str, ports: set[int]) -> list[str]:
    """Return the remaining processes of a drill, including those that listen on its ports."""
    marked = find_marked(mark)
    results = [describe_process(pid) for pid in marked]
    for item in psutil.net_connections("tcp") if ports else ():
        # A dying process loses its environment before its sockets. A process with an environment is another owner's.
        port = item.laddr.port if item.laddr and item.status == psutil.CONN_LISTEN else None
        if port in ports and (item.pid is None or item.pid in marked):
            results.append(f"somebody who listens on {port}")
    return results


def kill(pids: Sequence[int] | Iterator[int], number: int = signal.SIGKILL) -> float:
    """Send a signal to processes. Return the time just before."""
    struck = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return struck


def _reached(steps: list[WitnessStep], count: int) -> list[WitnessStep]:
    return steps if steps and steps[-1].step + 1 >= count else []


def check_lost(outcome: DrillOutcome, limit: int = 2 * EVERY) -> DrillOutcome:
    """Check that only the steps after the newest checkpoint, or the one before it, are lost."""
    if outcome.lost is not None and outcome.lost > limit:
        raise Perished(f"{outcome.lost} steps were lost, with a checkpoint every {EVERY}")
    return outcome
