"""What `ddp dev` and `ddp rerun` show of runs: the events of an order, the logs of all ranks, and the outcome."""

import argparse
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from ddp_cli.client.errors import ClientError, Conflict
from ddp_cli.client.follow import view_of
from ddp_cli.client.job import Job
from ddp_cli.client.logs import DevLogs, Follower, Line
from ddp_cli.client.orders import send_order
from ddp_cli.client.packing.archive import format_size
from ddp_cli.client.rerun import pack_again, watch_files
from ddp_cli.commands.io import ExitCode
from ddp_cli.view.display import View, can_redraw, choose_display
from ddp_operator.api.texts import format_duration
from ddp_operator.decide.failures import sentence
from ddp_pod.contract.dev_order import Event, Order
from ddp_pod.contract.failure_text import format_failure

_SECONDS_FOR_LINES: Final = 2.0  # that the last lines of a run may take
_SILENCE_SECONDS: Final = 0.1
_PROGRESS_BYTES: Final = 8 << 20
_MOST_EARLY_LINES: Final = 10_000
_BUSY_SECONDS: Final = 0.5  # between two tries to stop a run that is just being started
_TEXTS: Final = {
    "received": "pod 0 has the code",
    "sent": "all pods have the code ({pods})",
    "stopped": "run {run} has ended",
    "started": "run {run} starts",
}


class _Saved:
    """A packed file was saved."""


class _Item(NamedTuple):
    """What a thread reports. ``order``: the number of the order to which an event or an error belongs."""

    value: Event | Line | View | _Saved | ClientError | str
    order: int = 0


class Session:
    """A command that gives orders to a job and shows its runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._name = job.backend.argument(job.name)
        self._items: queue.Queue[_Item] = queue.Queue()
        self._display = choose_display(job.name, sys.stdout, quiet=False, plain=False)
        self._orders = 0
        self._began = time.monotonic()
        self._started = self._began
        self._run: int | None = None  # the lowest whose lines are shown; None: not known yet
        self._early: deque[Line] = deque(maxlen=_MOST_EARLY_LINES)
        self._is_stopping = False

    def wait_for_pods(self) -> bool:
        """Wait for the pods of a new job. Returns whether they run; else the job has ended. Raises: ClientError."""
        try:
            for status in self._job.changes():
                self._display.update(view_of(self._job.resource))
                if status.phase in ("Running", "Held"):
                    return True
            return False
        finally:
            self._display.close()

    def follow(self) -> int:
        """Show the present run until it ends. Returns the exit code. Raises: ClientError."""
        self._run = 1
        with self._showing(is_new=False):
            return self._conclude(self._carry_out(Order("follow")))

    def rerun(self, arguments: argparse.Namespace) -> int:
        """Start a run with the folder of the arguments, and show it. Returns the exit code. Raises: ClientError."""
        known = (self._job.resource.get("status") or {}).get("dev") or {}
        number = 1 + max(int(run.get("run") or 0) for run in (known, *(known.get("runs") or ())))
        with self._showing(is_new=True):
            if arguments.watch:
                return self._watch(arguments, number)
            return self._conclude(self._carry_out(*self._prepare(arguments, number)))

    def _watch(self, arguments: argparse.Namespace, number: int) -> int:
        """Start a run now, and another when a file is saved, until Ctrl-C."""
        self._feed(_Saved() for _ in watch_files(arguments.workdir, arguments.include))
        digest: str | None = None
        while not self._is_stopping:
            event: Event | None = None
            try:
                order, data = self._prepare(arguments, number)
            except ClientError as error:  # the next save may mend it
                self._display.line(f"ddp rerun: {error}")
            else:
                if arguments.no_code or order.digest != digest:
                    digest = order.digest
                    event = self._carry_out(order, data)
                    if event is None:
                        continue
                    self._conclude(event)
            if not self._is_stopping:
                self._display.line("waiting for a saved file; Ctrl-C ends it, and the pods are held")
                while not isinstance(value := self._items.get().value, _Saved):
                    self._print(value)
        return ExitCode.INTERRUPTED

    def _prepare(self, arguments: argparse.Namespace, number: int) -> tuple[Order, bytes]:
        """Return the order for a run, and its archive. Raises: ClientError."""
        self._began = time.monotonic()
        words = tuple(arguments.extra)
        if arguments.no_code:
            return Order("run", number, bool(words), words), b""
        packed = pack_again(self._job, arguments.workdir, arguments.include)
        self._display.line(packed.describe())
        self._print("packed")
        archive = packed.archive
        return Order("run", number, bool(words), words, archive.digest, len(archive.data)), archive.data

    def _carry_out(self, order: Order, data: bytes = b"") -> Event | None:
        """Send an order and show what happens. Returns its last event; None: a file was saved after the start.

        Raises: ClientError.
        """

        def report(sent: int) -> None:
            if sent % _PROGRESS_BYTES == 0:
                self._items.put(_Item(f"sent {format_size(sent)} of {format_size(len(data))}"))

        self._orders += 1
        self._started = time.monotonic()
        self._feed(send_order(self._job, order, data, on_progress=report), self._orders)
        is_confirmed = not data
        has_started = order.kind == "follow"
        is_saved = False
        while not (has_started and is_saved):
            try:
                value, number = self._items.get()
            except KeyboardInterrupt:
                self._interrupt(is_confirmed=is_confirmed)
                continue
            if isinstance(value, Event | ClientError) and number != self._orders:
                continue  # of an order that a later one has replaced
            if isinstance(value, ClientError):
                raise value
            if isinstance(value, _Saved):
                is_saved = True
            elif not isinstance(value, Event):
                self._print(value)
            elif value.kind in _TEXTS:
                is_confirmed = True
                has_started = has_started or value.kind == "started"
                self._print(_TEXTS[value.kind].format(run=value.run, pods=value.pods))
                if value.kind == "started":
                    self._note_start(value.run)
            elif value.kind:
                return value
        return None

    def _note_start(self, run: int) -> None:
        """Show the lines of a run, of which the first may have arrived before the event."""
        self._started = time.monotonic()
        self._run = run
        early = list(self._early)
        self._early.clear()
        for line in early:
            self._print(line)

    def _interrupt(self, *, is_confirmed: bool) -> None:
        """Stop the run at the first Ctrl-C. Raises: KeyboardInterrupt at the second, or before the code has arrived."""
        if not is_confirmed:
            self._display.line("the pods did not get the whole folder, so nothing has changed")
            raise KeyboardInterrupt
        if self._is_stopping:
            self._display.line(f"the run may continue: ddp why {self._name}")
            raise KeyboardInterrupt
        self._is_stopping = True
        self._display.line("stopping the run, and holding the pods; press Ctrl-C again to leave at once")
        self._feed(self._stop())

    def _stop(self) -> Iterator[str]:
        while True:
            last = list(send_order(self._job, Order("stop")))[-1]
            if last.kind != "refused":
                return
            yield f"{last.message}; trying again"
            time.sleep(_BUSY_SECONDS)

    def _conclude(self, event: Event | None) -> int:
        """Show the end of a run. Returns the exit code. Raises: Conflict, if the order was refused."""
        assert event is not None  # without --watch
        seconds = time.monotonic() - self._started
        if event.kind == "refused":
            raise Conflict("; ".join(filter(None, (event.message, event.remedy))))
        deadline = time.monotonic() + _SECONDS_FOR_LINES
        while time.monotonic() < deadline:
            try:
                self._print(self._items.get(timeout=_SILENCE_SECONDS).value)
            except queue.Empty:
                if event.run not in self._logs.open_runs.values():
                    break
        self._display.line(describe_outcome(self._job.name, event, seconds))
        name = self._name
        self._display.line(f"the pods are held; next:  ddp rerun {name}   ddp exec {name}   ddp release {name}")
        return {"Succeeded": ExitCode.OK, "Stopped": ExitCode.INTERRUPTED}.get(event.result, ExitCode.FAILED)

    # -- the threads

    @contextmanager
    def _showing(self, *, is_new: bool) -> Iterator[None]:
        """Show the logs of the runs, and on a terminal the progress. ``is_new``: only of runs that start from now."""
        source = self._job.backend.logs(self._job.name, node=None, attempt=None, tail=None)
        self._logs = DevLogs(source, is_new=is_new)
        self._feed(Follower(self._logs).lines())
        if can_redraw(sys.stdout):
            job = Job(self._job.backend, self._job.name, self._job.resource)
            self._feed(view_of(job.resource) for _ in job.changes())
        try:
            yield
        finally:
            self._display.close()

    def _feed(self, values: Iterable[Event | Line | View | _Saved | str], order: int = 0) -> None:
        """Put the values into the queue, in a thread."""

        def put() -> None:
            try:
                for value in values:
                    self._items.put(_Item(value, order))
            except ClientError as error:
                self._items.put(_Item(error if order else str(error), order))

        threading.Thread(target=put, daemon=True).start()

    def _print(self, value: object) -> None:
        match value:
            case View():
                self._display.update(value)
            case Line() if self._run is None:
                self._early.append(value)
            case Line() if self._run is not None and value.run >= self._run:
                self._display.line(str(value))
            case str():
                self._display.line(f"{time.monotonic() - self._began:6.2f} s  {value}")


def describe_outcome(name: str, event: Event, seconds: float) -> str:
    """Return how a run ended, and for a failure its cause and the remedy as `ddp why` does."""
    end = {"Succeeded": "succeeded", "Stopped": "was stopped"}.get(event.result, "failed")
    text = f"{name}: run {event.run} {end} after {format_duration(seconds)}"
    failure = event.failure
    if failure is None:
        return text
    places = (("rank", failure.rank), ("pod", failure.pod_index), ("exit code", failure.exit_code))
    cause = sentence(format_failure(failure.category, places, failure.message))
    remedy = sentence(failure.remedy)
    return " ".join(filter(None, (f"{text}: {cause}", remedy[:1].upper() + remedy[1:])))
