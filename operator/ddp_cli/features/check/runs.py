"""The runs of `ddp check`: each is a `ddp run` in a fresh copy of the user's folder."""

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from ddp_cli.client.errors import ClientError
from ddp_cli.client.runs import open_run
from ddp_cli.features.check.copying import copy_folder
from ddp_cli.features.check.outputs import find_outputs
from ddp_cli.features.check.recordings import Recording, read_idle, read_recording
from ddp_cli.features.check.run_process import RunHost, RunOrder, RunProcess
from ddp_cli.features.check.watch import Watch
from ddp_cli.local.machine import ENV_PYTHON, choose_python
from ddp_operator.api.display_texts import SLOW_REMEDY
from ddp_operator.api.parse import parse_status
from ddp_operator.api.status import Condition
from ddp_operator.decide.conditions import PROGRESSING, TRAINS_AS_ONE, find_obstacle
from ddp_operator.decide.doubts import WAITING_FOR_GROUP
from ddp_pod.contract.names import CHECK_VARIABLE
from ddp_pod.contract.records import to_json
from ddp_pod.features.check.contract import (
    MARK_FILE,
    MOST_STEPS,
    ORDER_FILE,
    IdleRecord,
    Kill,
    RecordingOrder,
    SaveRecord,
)

_BATCHES: Final = (6, 48)
"""Batches of an epoch; the second number, if the first is less than one accumulation of gradients."""
_FEW_STEPS: Final = 6
"""Steps of a reference; with fewer an earlier training may have left too few."""
_LEAST_COMPARED: Final = 2
"""Steps that the last process of the resumed run has in common with the reference, at least."""
_MAX_RESTARTS: Final = 8  # of the resumed run
_CONTINUED_STEPS: Final = 3  # of a run in the folder of one that was stopped
RECORDS: Final = "records"
_LOG_BYTES: Final = 16_384  # of the end of a log
_LAST_LINES: Final = 5
_LAUNCHER: Final = "[launcher]"  # prefix of the launcher's lines in a log
_OBSTACLES: Final = (TRAINS_AS_ONE, PROGRESSING)  # conditions
_POLL_SECONDS: Final = 0.05
_OBSTACLE_SECONDS: Final = 2.0  # between two readings of what the launchers have observed
_RUN_SECONDS: Final = 600.0
_END_SECONDS: Final = 45.0  # after SIGTERM; more than a pod's default grace period
_KILL_SECONDS: Final = 15.0
# Compiled modules have no hooks; a tracker would show each run as an experiment.
_ENVIRONMENT: Final = {"TORCH_COMPILE_DISABLE": "1", "WANDB_MODE": "disabled"}


@dataclass(frozen=True)
class Request:
    """What to check.

    ``options``: of `ddp run`, with the script; ``text``: its standard input; ``arguments``: of the script;
    ``timeout``: seconds for all runs; ``pods``: of each run.
    """

    folder: Path
    options: Sequence[str]
    arguments: Sequence[str]
    steps: int
    seed: int
    timeout: float = 1800.0
    pods: int = 2
    keep: bool = False
    text: str = ""


@dataclass(frozen=True)
class CheckedRun:
    """A finished run.

    ``code``: exit code of `ddp run`, whose output is ``output``; ``problem``: why it was ended early; ``signalled``:
    Unix time of SIGTERM; ``stop_seconds``: from then to the end; ``steps``: that all ranks completed; ``ranks``: those
    that completed a step; ``torn``: a checkpoint that is not complete; ``stall``: the problem, if the ranks made no
    progress any more; ``last_lines``: of the script's log, if it made no step.
    """

    name: str
    order: RecordingOrder
    records: Path
    code: int
    seconds: float
    output: str
    steps: int
    ranks: int
    saves: Sequence[SaveRecord]
    problem: str = ""
    signalled: float | None = None
    stop_seconds: float = 0.0
    torn: str = ""
    stall: str = ""
    last_lines: Sequence[str] = ()

    @property
    def succeeded(self) -> bool:
        """Whether it ended as ordered."""
        return not self.problem and (not self.code or self.signalled is not None)


class _Copy(NamedTuple):
    """A copy of the user's folder. ``began``: Unix time of its first run; ``saves``: of its runs."""

    folder: Path
    began: float
    saves: list[SaveRecord]


class Runs:
    """The runs of a check, and the temporary folder that has their copies and records until the end.

    ``left_out``: what earlier trainings have written, which the copies lack.
    """

    def __init__(self, request: Request, show: Callable[[str, str], None]) -> None:
        """``show`` receives the name of a run and its progress."""
        self._request = request
        self._show = show
        self._random = random.Random(request.seed)
        self._deadline = time.monotonic() + request.timeout
        self._host = RunHost(request.pods)
        self.left_out: Sequence[str] = ()
        self.scratch = Path(tempfile.mkdtemp(prefix="ddp-check-")).resolve()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._host.close()
        if not self._request.keep:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def run_all(self) -> list[CheckedRun]:
        """Run the reference, and if it succeeds the repeat and the resumed run. Raises: ClientError."""
        reference = self._run_reference()
        runs = [reference]
        if not reference.succeeded or not reference.steps:
            return runs

        batches = reference.order.batches
        mark = choose_mark(reference.saves, reference.steps, self._random)
        with self._copy("repeat") as copy:
            runs.append(self._run("repeat", copy, steps=MOST_STEPS, batches=batches, mark=mark))
            if not runs[-1].problem and has_completed_early(read_recording(runs[-1].records), reference.steps):
                runs.append(self._run("continued", copy, steps=_CONTINUED_STEPS, batches=batches))
        kills = choose_kills(reference.saves, reference.steps, reference.ranks, self._random)
        if kills:
            first_save = min(save.step for save in reference.saves if save.step)
            steps = max(reference.steps - first_save, *(kill.step + 1 for kill in kills))
            with self._copy("resumed") as copy:
                runs.append(self._run("resumed", copy, steps=steps, batches=batches, kills=kills))
        return runs

    def _run_reference(self) -> CheckedRun:
        """Run the reference; with few steps again without what earlier trainings have left, or with longer epochs."""
        needed = min(_FEW_STEPS, self._request.steps)
        run = self._run_whole("reference", _BATCHES[0])
        if run.steps >= needed or run.code or run.problem:
            return run
        idle = read_idle(run.records)
        outputs = find_outputs(self._request.folder, list_read_files(run, idle))
        best = run
        best_left_out: Sequence[str] = ()
        for number, left_out in enumerate(dict.fromkeys([tuple(outputs[:1]), tuple(outputs)]), 2):
            # An older checkpoint beside the newest one may leave few steps too.
            if not left_out or best.steps >= needed:
                continue
            self.left_out = left_out
            again = self._run_whole(f"reference-{number}", _BATCHES[0])
            if again.steps > best.steps:
                best = again
                best_left_out = left_out
        self.left_out = best_left_out
        if not best.steps and (idle is None or idle.is_cut):
            return self._run_whole(f"reference-{_BATCHES[1]}", _BATCHES[1])
        return best

    def _run_whole(self, name: str, batches: int) -> CheckedRun:
        with self._copy(name) as copy:
            return self._run(name, copy, steps=self._request.steps, batches=batches)

    @contextmanager
    def _copy(self, name: str) -> Iterator[_Copy]:
        """Copy the folder for a run, and remove at the end what was saved in it and elsewhere."""
        folder = self.scratch / name / (self._request.folder.resolve().name or "copy")
        copy_folder(self._request.folder, folder)
        for entry in self.left_out:
            if (folder / entry).is_dir():
                shutil.rmtree(folder / entry)
            else:
                (folder / entry).unlink()
        copy = _Copy(folder, time.time(), [])
        try:
            yield copy
        finally:
            remove_saves(copy.saves, folder, copy.began)
            if not self._request.keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _run(
        self, name: str, copy: _Copy, *, steps: int, batches: int, mark: int = 0, kills: tuple[Kill, ...] = ()
    ) -> CheckedRun:
        home = self.scratch / name
        order = RecordingOrder(folder=str(copy.folder), steps=steps, batches=batches, mark=mark, kills=kills)
        records = home / RECORDS
        records.mkdir(parents=True)
        (records / ORDER_FILE).write_text(json.dumps(to_json(order)), encoding="utf-8")

        began = time.time()
        process = self._start(home, copy.folder, order)
        watch = Watch(records, restarts=bool(kills))
        torn = ""
        stall = ""
        try:
            problem, signalled = self._follow(name, process, watch, order, home)
            stall = problem if watch.find_stall() else ""
        finally:
            _end(process)
            ended = time.time()
            torn = find_torn(watch.saves)
            copy.saves.extend(watch.saves)
        run = CheckedRun(
            name=name,
            order=order,
            records=records,
            code=process.wait(),
            seconds=time.time() - began,
            output=(home / "output.txt").read_text(encoding="utf-8", errors="replace"),
            steps=watch.steps,
            ranks=watch.ranks,
            saves=watch.saves,
            problem=problem,
            signalled=signalled,
            stop_seconds=ended - (signalled or ended),
            torn=torn,
            stall=stall,
            last_lines=() if watch.steps else read_last_lines(home / "runs"),
        )
        self._show(name, f"{run.steps} steps in {run.seconds:.0f} s\n")
        return run

    def _start(self, home: Path, copy: Path, order: RecordingOrder) -> RunProcess:
        """Start `ddp run` in the copy."""
        restarts = _MAX_RESTARTS if order.kills else 0
        options = ["--quiet", "--plain", "--runs-dir", str(home / "runs"), "--max-restarts", str(restarts)]
        environment = {
            **_ENVIRONMENT,
            ENV_PYTHON: choose_python(os.environ),
            **os.environ,
            CHECK_VARIABLE: str(home / RECORDS),
        }
        (home / "input.txt").write_text(self._request.text, encoding="utf-8")
        run = RunOrder(
            words=[*options, *self._request.options, "--", *self._request.arguments],
            folder=str(copy),
            environment=move_python_path(environment, self._request.folder.resolve(), copy),
            is_first=not (order.mark or order.kills),
        )
        return self._host.start(run, home / "input.txt", home / "output.txt")

    def _follow(
        self, name: str, process: RunProcess, watch: Watch, order: RecordingOrder, home: Path
    ) -> tuple[str, float | None]:
        """Wait for the end of a run; return why it has to be ended, and the time of the signal that was ordered."""
        until = time.monotonic() + _RUN_SECONDS
        next_look = 0.0
        obstacle: Condition | None = None
        signalled: float | None = None
        total = order.mark or order.steps
        while process.poll() is None:
            watch.read()
            now = time.monotonic()
            if now >= next_look:
                obstacle = find_run_obstacle(home / "runs")
                watch.waits = obstacle is not None and obstacle.reason == WAITING_FOR_GROUP
                next_look = now + _OBSTACLE_SECONDS
            self._show(name, f"{min(watch.steps, total)}/{total} steps")
            if order.mark and (home / RECORDS / MARK_FILE).exists():
                signalled = time.time()
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                break
            problem = watch.find_stall()
            if now > self._deadline:
                problem = f"{watch.steps} of {total} steps when the time of the check was over; use a longer --timeout"
            elif now > until:
                problem = f"{watch.steps} of {total} steps after {_RUN_SECONDS:.0f} s; use --steps, or less data"
            if problem:
                known = (
                    obstacle.message.removesuffix(f"; {SLOW_REMEDY}")
                    if obstacle is not None
                    else "--keep keeps its logs"
                )
                return f"{problem}; {known}", None
            time.sleep(_POLL_SECONDS)
        watch.read()
        return "", signalled


def list_read_files(run: CheckedRun, idle: IdleRecord | None) -> list[str]:
    """Return the files of the checked folder that the processes of a run have read. ``idle``: those without a step."""
    folder = Path(run.order.folder)
    loads = [load for processes in read_recording(run.records).ranks.values() for load in processes[0].loads]
    paths = [Path(load.path) for load in loads if not load.step]
    read = [str(path.relative_to(folder)) for path in paths if path.is_relative_to(folder)]
    return [*read, *(idle.opened if idle is not None else ())]


def read_last_lines(runs: Path) -> list[str]:
    """Return the last lines that the script has written in the newest run, of the first pod that has any."""
    for log in sorted(runs.glob("*/logs/*.log")):
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            text = file.read().decode("utf-8", errors="replace")
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_LAUNCHER)]
            if lines:
                return lines[-_LAST_LINES:]
    return []


def find_run_obstacle(runs: Path) -> Condition | None:
    """Return what keeps the newest run from training, as its launchers have observed; None if nothing is known."""
    try:
        obstacle = find_obstacle(parse_status(open_run(None, runs).read_status()))
    except (ClientError, ValueError):
        return None
    return obstacle if obstacle is not None and obstacle.type in _OBSTACLES else None


def has_completed_early(repeat: Recording, steps: int) -> bool:
    """Return whether all ranks have ended with exit code 0 before the last of the reference's ``steps``.

    A script that leaves its loop at SIGTERM runs what follows the loop, as after a whole training.
    """
    firsts = repeat.firsts
    return bool(firsts) and all(process.ended_itself and len(process.steps) < steps for process in firsts)


def choose_mark(saves: Sequence[SaveRecord], steps: int, chooser: random.Random) -> int:
    """Return the step after which the run gets SIGTERM: in the second half, with no regular save soon after."""
    candidates = list(range(max(1, steps // 2), max(2, steps - 1)))
    regular = {save.step for save in saves}
    return chooser.choice([step for step in candidates if not regular & {step, step + 1}] or candidates)


def choose_kills(saves: Sequence[SaveRecord], steps: int, ranks: int, chooser: random.Random) -> tuple[Kill, ...]:
    """Return the kills of a rank, then of all ranks, after the first save; none without a save in time.

    The second one follows the last save that leaves steps to compare: some state changes late, such as an average.
    """
    saved = sorted(save.step for save in saves if save.step > 0)
    last = steps - _LEAST_COMPARED
    if not saved or saved[0] > last:
        return ()
    first = chooser.randint(saved[0] + 1, max(saved[0] + 1, last - 1))
    resumed = max(step for step in saved if step <= first)
    latest = max((step for step in saved if step < last), default=resumed)
    second = chooser.randint(max(1, latest - resumed + 1), max(1, last - resumed))
    return Kill(step=first, rank=chooser.randrange(ranks)), Kill(step=second)


def _end(process: RunProcess) -> None:
    """End a run that still runs. A second signal has `ddp run` kill its pods at once."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS / 3)
    if process.poll() is None:
        process.kill()
        process.wait()


def move_python_path(environment: Mapping[str, str], folder: Path, copy: Path) -> dict[str, str]:
    """Return the environment whose PYTHONPATH names the copy instead of the folder."""
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    for index, entry in enumerate(entries):
        if Path(entry).is_relative_to(folder):
            moved = copy / Path(entry).relative_to(folder)
            entries[index] = str(moved) if moved.exists() else entry  # a virtual environment is not copied
    return {**environment, "PYTHONPATH": os.pathsep.join(entries)} if any(entries) else dict(environment)


def find_torn(saves: Sequence[SaveRecord]) -> str:
    """Return a checkpoint that is not complete; empty: there is none. A name that extends another one is temporary."""
    files = sorted({Path(save.path) for save in saves if Path(save.path).is_file()})
    torn = [file for file in files if _is_torn(file)]
    whole = [file.name for file in files if file not in torn]
    return next((file.name for file in torn if not any(name in file.name for name in whole)), "")


def _is_torn(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as stream:
        head = stream.read(4)
        return not head or (head == b"PK\x03\x04" and not zipfile.is_zipfile(stream))
    return False


def remove_saves(saves: Sequence[SaveRecord], copy: Path, began: float) -> None:
    """Remove the files that a run has saved outside of its copy, so that the next run does not resume from them."""
    for save in saves:
        path = copy / save.path
        if path.is_relative_to(copy) or ".." in path.parts:
            continue
        if not path.is_dir() or path.is_symlink():
            _remove_file(path, began)
            continue
        for file in (*path.glob("*.distcp"), path / ".metadata"):  # of torch.distributed.checkpoint
            _remove_file(file, began)
        with suppress(OSError):
            path.rmdir()


def _remove_file(path: Path, began: float) -> None:
    """Remove a file that has changed since the run began."""
    with suppress(OSError):
        if path.lstat().st_ctime >= began:
            path.unlink()
