"""The run folder: all files of one `ddp run`. Only this module knows its layout."""

import csv
import errno
import fcntl
import io
import json
import os
import re
import shutil
import socket
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from ddp_cli.local.own_files import open_below
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.status import ENDED_PHASES
from ddp_operator.api.stored_fields import Reading, read_fields, read_status
from ddp_operator.api.yaml_writer import format_documents
from ddp_operator.decide.pace import Rates
from ddp_operator.decide.report import Page
from ddp_operator.features import SCHEMA
from ddp_operator.reading.pages import decode_report
from ddp_pod.contract.credentials import hide_credentials
from ddp_pod.contract.plain_files import open_plain
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.thinning import MOST_ROWS, thin_rows

RUNTIME_LEFTOVERS: Final = ("**/*.tmp", "output/*", "groups/*.collectives")
"""Temporary files and pipes of a pod's processes in its runtime folder."""
COLUMNS: Final = {
    "time": None,  # Unix seconds
    "attempt": None,
    "epoch": "epoch",
    "step": "step",
    "loss": "loss",
    "samples_per_second": None,
    "steps_per_second": None,
    "learning_rate": "learning_rate",
    "validation_accuracy": "val_accuracy",
    "validation_loss": "val_loss",
    "progress": "share",
    "checkpoint_step": "checkpoint_step",
    # Counters of rank 0's process, which restart at 0 with the process.
    "steps": "steps",
    "step_seconds": "step_seconds",
    "data_seconds": "data_seconds",
    "compute_seconds": "compute_seconds",
}
"""Columns of metrics.csv and the number of RankProgress in each; None: the column is computed."""

ENV_RUN_FOLDER: Final = "DDP_RUN_FOLDER_FD"
"""Variable with the file descriptor to which `ddp run` writes the path of its folder, for its parent process."""
_MOST_CHARACTERS: Final = 64 << 20
STATUS_FILE: Final = "status.yaml"
PID_FILE: Final = "pid"
"""Of a pod's first process, in the pod's folder."""
DELETED: Final = "deleted"
"""A key of changes.json beside fields of the spec: stop the run and remove its folder."""
_WRITER: Final = """\
# Written by `ddp run`, process {pid} on {host}, since {since}. It is current only while that process runs.
# `ddp why` checks this. Manual check: flock -n job.yaml true
# succeeds in this folder after the process has ended.
"""


class _Metadata(msgspec.Struct):
    """What a run's resource has of Kubernetes' ObjectMeta."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    resourceVersion: str = ""
    creationTimestamp: str = ""
    deletionTimestamp: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RunFolder:
    """Paths and writers of one run's folder.

    A failed write (a full disk) does not end the run: it calls ``on_problem`` once, and later writes are attempted.

    The writer holds a lock on job.yaml until its process ends. Without the lock, a status Running means a killed run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path / "job.yaml"
        self.command = path / "command.txt"
        self.environment = path / "environment.json"
        self.on_problem: Callable[[str], None] = lambda problem: None
        self._failing: set[Path] = set()
        self._since = ""
        self._rows = 0  # in metrics.csv
        self.left_out: tuple[str, ...] = ()
        self.changes = path / "changes.json"
        self.status = path / STATUS_FILE
        self.events = path / "events.log"
        self.errors = path / "errors.log"
        self.metrics = path / "metrics.csv"
        self.summary = path / "summary.txt"
        self.report = path / "report.html"
        self.reports = path / "reports"
        self.logs = path / "logs"

    @classmethod
    def create(cls, runs: Path, name: str, now: datetime) -> Self:
        """Create a folder ``<name>-<date>-<time>``, with a number for a second run in the same second.

        Raises: OSError.
        """
        make_runs_folder(runs)
        stem = f"{name}-{now.astimezone():%Y%m%d-%H%M%S}"
        for number in range(1, 1000):
            path = runs / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(mode=0o700)  # manifests, logs and volumes may contain Secrets
            except FileExistsError:
                continue
            folder = cls(path)
            folder._since = _local_time(now)
            with folder._remove_if_incomplete():
                (path / ".gitignore").write_text("*\n", encoding="ascii")  # --runs-dir may be a packed folder
                folder.logs.mkdir()
                folder.reports.mkdir()
            return folder
        raise FileExistsError(f"{runs / stem}: 999 runs have started within one second")

    def write_manifest(
        self, text: str, children: Iterable[Mapping[str, Any]], resource: Mapping[str, Any], command: str
    ) -> None:
        """Write the job's file, the objects built from it, and the command, and lock the folder. Raises: OSError."""
        with self._remove_if_incomplete():
            _write_private(self.manifest, text)
            self._lock()
            self.command.write_text(f"{command}\n", encoding="utf-8", errors="surrogateescape")
            _write_private(self.path / "objects.yaml", format_documents([resource, *children]))

    @contextmanager
    def _remove_if_incomplete(self) -> Iterator[None]:
        """Remove the folder if it cannot be completed, because nothing has run in it."""
        try:
            yield
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def announce(self) -> None:
        """Write the folder's path to the parent process, if ``ENV_RUN_FOLDER`` is set."""
        descriptor = os.environ.pop(ENV_RUN_FOLDER, None)
        if descriptor is not None:
            with (
                suppress(OSError, ValueError),
                open(int(descriptor), "w", encoding="utf-8", errors="surrogateescape") as stream,
            ):
                stream.write(str(self.path.absolute()))

    def _lock(self) -> None:
        descriptor = os.open(self.manifest, os.O_RDWR)
        weakref.finalize(self, os.close, descriptor)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file of this folder: the ``opener`` with which commands read it. Raises: OSError."""
        return open_below(self.path, name, flags)

    def read(self, path: Path) -> str:
        """Return the first megabytes of a file of this folder as text. Raises: OSError."""
        with open(path, encoding="utf-8", errors="replace", opener=self.open_file) as stream:
            return stream.read(_MOST_CHARACTERS)

    def read_status(self) -> dict[str, Any]:
        """Return the resource in status.yaml; ``left_out`` then names its fields that cannot be read.

        Raises: ValueError, if `ddp run` has not written it.
        """
        try:
            documents = load_documents(self.read(self.status))  # bounded: the file may come from somebody else
        except (OSError, InvalidManifest) as error:
            raise ValueError(str(error).splitlines()[0]) from None
        content = documents[0] if len(documents) == 1 else {}
        metadata = read_fields(content.get("metadata"), _Metadata, "metadata")
        if metadata.value is msgspec.UNSET or not isinstance(content.get("spec"), dict):
            raise ValueError("it is no DDPTrainingJob")
        spec = read_fields(SCHEMA.take_over(content["spec"]), SCHEMA.spec, "spec")
        if spec.value is msgspec.UNSET:
            spec = Reading(content["spec"])  # most commands do without it
        status = read_status(content)
        self.left_out = (*metadata.left_out, *spec.left_out, *status.left_out)
        return {
            **content,
            "metadata": metadata.value,
            "spec": spec.value,
            "status": status.stored,
        }

    @property
    def in_use(self) -> bool:
        """Whether a `ddp run` holds the folder's lock."""
        try:
            descriptor = self.open_file(str(self.manifest))
        except PermissionError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def was_written_here(self) -> bool:
        """Whether this host wrote status.yaml: network file systems do not always share locks."""
        try:
            text = self.read(self.status)
        except OSError:
            return False
        return re.match(rf"# Written by .* on {re.escape(socket.gethostname())}, .*\n", text) is not None

    @property
    def command_line(self) -> str:
        """The command line; empty in an older folder."""
        try:
            return self.read(self.command).strip()
        except OSError:
            return ""

    @property
    def facts(self) -> dict[str, str]:
        """The host, versions and commit of the run; empty in an older folder."""
        return {str(name): str(value) for name, value in self._read_object(self.environment).items()}

    def write_facts(self, facts: Mapping[str, str]) -> None:
        """Write environment.json."""
        self.write(self.environment, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    def add_changes(self, changes: Mapping[str, Any]) -> None:
        """Request changes besides those that other processes have requested or request now. Raises: OSError."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            replace_file(self.changes, json.dumps({**self.read_changes(), **changes}))
        finally:
            os.close(descriptor)

    def read_changes(self) -> dict[str, Any]:
        """Return the changes that the user requested: fields of the spec with their new values."""
        return self._read_object(self.changes)

    def _read_object(self, path: Path) -> dict[str, Any]:
        """Return the JSON object of a file, empty if there is none."""
        try:
            content = json.loads(self.read(path))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def last_write(self) -> float:
        """Return the time of the run's last write (Unix seconds); reports are written every second. Raises: OSError."""
        written = [self.status, self.metrics, self.events, *self.reports.glob("*"), *self.logs.glob("*")]
        return max(path.lstat().st_mtime for path in written if os.path.lexists(path))

    def write_status(self, resource: Mapping[str, Any]) -> bool:
        """Replace status.yaml atomically; return whether it was written.

        While the job runs, the first line names the writer.
        """
        keys = ("apiVersion", "kind", "metadata", "spec", "status")
        content = {key: resource[key] for key in keys if key in resource}
        ended = (resource.get("status") or {}).get("phase") in ENDED_PHASES
        head = "" if ended else _WRITER.format(pid=os.getpid(), host=socket.gethostname(), since=self._since)
        return self.write(self.status, head + format_documents([content]))

    def write_event(self, moment: datetime, kind: str, reason: str, message: str) -> None:
        """Append a line to events.log."""
        text = hide_credentials(" ".join(message.split()))
        with self._tolerantly(self.events), self.events.open("a", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(f"{_local_time(moment)} {kind} {reason}: {text}\n")

    def write_error(self, moment: datetime, where: str, error: BaseException) -> None:
        """Append the traceback of an unexpected error to errors.log."""
        with self._tolerantly(self.errors), self.errors.open("a", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(f"{_local_time(moment)} {where}\n")
            stream.write("".join(traceback.format_exception(error)) + "\n")

    def find_pod_file(self, node: int, name: str) -> Path | None:
        """Return the newest file of this name of the pods with an index; None if there is none."""
        pods = re.compile(rf".*-{node}-[a-z0-9]+")
        files = [file for file in self.path.glob(f"pods/*/{name}") if pods.fullmatch(file.parent.name)]
        with suppress(OSError):
            return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
        return None

    def read_step_hint(self, attempt: int) -> str:
        """Return why no step of an attempt is visible, by the last report of its pod 0; empty if steps are."""
        return next((page.step_hint for page in self.read_reports(f"attempt-{attempt}-pod-0")), "")

    def read_reports(self, pattern: str = "*") -> list[Page]:
        """Return the last reports of pods by the pattern of their names, such as attempt-1-pod-0."""
        return [page for _, page in self._list_reports(pattern)]

    def read_pod_reports(self, attempt: int) -> list[tuple[int, Page]]:
        """Return the last reports of the pods of an attempt with their indexes."""
        named = [(name.rpartition("-")[2], page) for name, page in self._list_reports(f"attempt-{attempt}-pod-*")]
        return sorted(((int(index), page) for index, page in named if index.isdecimal()), key=lambda item: item[0])

    def _list_reports(self, pattern: str) -> Iterator[tuple[str, Page]]:
        """Yield the names and the pages of the reports that can be read, by their names."""
        for path in sorted(self.reports.glob(f"{pattern}.json")):
            with suppress(OSError):
                yield path.stem, decode_report(self.read(path).encode("utf-8", "replace"))

    def read_events(self) -> str:
        """Return the lines of events.log; empty before the first event."""
        try:
            return self.read(self.events)
        except OSError:
            return ""

    def read_rows(self) -> list[dict[str, float]]:
        """Return the rows of metrics.csv, without cells that are not numbers; none before the first row."""
        rows: list[dict[str, float]] = []
        try:
            text = self.read(self.metrics)
        except OSError:
            return rows
        with suppress(csv.Error):  # as of a line that a crash has cut
            for row in csv.DictReader(io.StringIO(text, newline="")):
                rows.append({})
                for name, cell in row.items():
                    with suppress(TypeError, ValueError):
                        rows[-1][name] = float(cell)
        return rows

    def write_row(self, moment: datetime, attempt: int, page: Page, rates: Rates | None = None) -> None:
        """Append a row to metrics.csv; unknown values are left empty."""
        values = list_values(round(moment.timestamp(), 3), attempt, page.progress, rates)
        new = not self.metrics.exists() or not self.metrics.stat().st_size
        with (
            self._tolerantly(self.metrics),
            self.metrics.open("a", encoding="utf-8", errors="surrogateescape", newline="") as stream,
        ):
            writer = csv.writer(stream)
            if new:
                writer.writerow(COLUMNS)
            writer.writerow(values.values())
        self._rows += 1
        if self._rows > 2 * MOST_ROWS:
            self._thin_rows()

    def _thin_rows(self) -> None:
        """Replace metrics.csv by fewer rows, so that it stays bounded while the run grows."""
        kept = thin_rows([row for row in self.read_rows() if "time" in row], MOST_ROWS)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(COLUMNS), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)
        if self.write(self.metrics, text.getvalue()):
            self._rows = len(kept)

    def write(self, path: Path, text: str) -> bool:
        """Replace a file atomically; return whether it was written."""
        with self._tolerantly(path):
            replace_file(path, text, private=True)
        return path not in self._failing

    @contextmanager
    def _tolerantly(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failing:
                self.on_problem(f"{path} cannot be written ({error.strerror or error}); the run continues without it")
            self._failing.add(path)
        else:
            self._failing.discard(path)


def _local_time(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%dT%H:%M:%S%z}"


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read. Raises: OSError."""
    with open(path, "w", opener=open_plain, encoding="utf-8", errors="surrogateescape") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(text)


def replace_file(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file atomically. ``private``: only its owner may read it. Raises: OSError.

    In a locale without UTF-8 Python decodes names of files and arguments with surrogates; their bytes are written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # it may be a link that was planted, or the file of a killed process
        mode = 0o600 if private else 0o666
        with open(
            temporary,
            "x",
            opener=lambda name, flags: open_plain(name, flags, mode),
            encoding="utf-8",
            errors="surrogateescape",
        ) as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_runs_folder(path: Path) -> None:
    """Create the folder of runs. Neither git nor a later `ddp submit` takes its files. Raises: OSError."""
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link; name its target", str(path))
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        (path / ".gitignore").write_text("*\n", encoding="ascii")


def is_out_of_space(error: Exception) -> bool:
    """Return whether the disk, or the user's quota, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def remove_temporary_files(folder: Path, *patterns: str) -> None:
    """Remove files that match the patterns; their writers have ended."""
    for pattern in patterns:
        for file in folder.glob(pattern):
            with suppress(OSError):
                file.unlink()


def list_values(time: float, attempt: int, progress: RankProgress, rates: Rates | None) -> dict[str, float | None]:
    """Return the values of the columns of a row; None: unknown."""
    samples = rates.samples if rates is not None else None
    derived = {
        "time": time,
        "attempt": attempt,
        "samples_per_second": progress.samples_per_second if samples is None else samples,
        "steps_per_second": rates.steps if rates is not None else None,
    }
    return {name: derived[name] if field is None else getattr(progress, field) for name, field in COLUMNS.items()}


def choose_rate(rows: Iterable[Mapping[str, float]]) -> tuple[str, str]:
    """Return the throughput's column and unit: samples, or steps if no samples are reported."""
    if any(row.get("samples_per_second", 0.0) > 0 for row in rows):
        return "samples_per_second", "samples/s"
    return "steps_per_second", "steps/s"
