"""What `ddp dev` and `ddp rerun` show of runs: the events of an order, the logs of all ranks, and the outcome."""

import argparse
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from ddp_cli.client.errors import ClientError
from ddp_cli.client.follow import view_of
from ddp_cli.client.job import Job
from ddp_cli.client.logs import Follower, Line
from ddp_cli.client.packing.archive import format_size
from ddp_cli.commands.io import ExitCode
from ddp_cli.features.dev.orders import OrderRefused, send_order
from ddp_cli.features.dev.rerun import CannotPackAgain, pack_again, watch_files
from ddp_cli.features.dev.run_lines import DevLogs
from ddp_cli.view.display import View, can_redraw, choose_display
from ddp_cli.view.failures import sentence
from ddp_operator.api.display_texts import format_duration
from ddp_pod.contract.failure_text import format_failure
from ddp_pod.features.dev.contract import Event, Order

_SECONDS_FOR_LINES: Final = 2.0  # that the last lines of a run may take
_SILENCE_SECONDS: Final = 0.1
_PROGRESS_BYTES: Final = 8 << 20
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
    """A command that gives orders to a job and shows its runs from the number ``run`` on."""

    def __init__(self, job: Job, run: int = 1) -> None:
        self._job = job
        self._name = job.backend.argument(job.name)
        self._run = run
        self._items: queue.Queue[_Item] = queue.Queue()
        self._display = choose_display(job.name, sys.stdout, quiet=False, plain=False)
        self._logs = DevLogs(job.backend.logs(job.name, node=None, attempt=None, tail=None), is_new=run > 1)
        self._orders = 0
        self._began = time.monotonic()
        self._started = self._began
        self._is_saved = False
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
        with self._showing():
            return self._conclude(self._carry_out(Order("follow")))

    def rerun(self, arguments: argparse.Namespace) -> int:
        """Start a run with the folder of the arguments, and show it. Returns the exit code. Raises: ClientError."""
        with self._showing():
            if arguments.watch:
                return self._watch(arguments)
            return self._conclude(self._carry_out(*self._prepare(arguments)))

    def _watch(self, arguments: argparse.Namespace) -> int:
        """Start a run now, and another when a file is saved, until Ctrl-C."""
        self._feed(_Saved() for _ in watch_files(arguments.workdir, arguments.include))
        digest: str | None = None
        while not self._is_stopping:
            self._is_saved = False
            try:
                order, data = self._prepare(arguments)
                if arguments.no_code or order.digest != digest:
                    event = self._carry_out(order, data)
                    digest = order.digest
                    if event is not None:
                        self._conclude(event)
            except (CannotPackAgain, OrderRefused) as error:  # the next save may mend it
                self._display.line(f"ddp rerun: {error}")
            if not self._is_stopping and not self._is_saved:
                self._display.line("waiting for a saved file; Ctrl-C ends it, and the pods are held")
                while not self._is_saved:
                    self._show(self._items.get().value)
        return ExitCode.INTERRUPTED

    def _prepare(self, arguments: argparse.Namespace) -> tuple[Order, bytes]:
        """Return the order for a run, and its archive. Raises: ClientError."""
        self._began = time.monotonic()
        words = tuple(arguments.extra)
        if arguments.no_code:
            return Order("run", self._run, bool(words), words), b""
        packed = pack_again(self._job, arguments.workdir, arguments.include)
        self._display.line(packed.describe())
        self._show("packed")
        archive = packed.archive
        return Order("run", self._run, bool(words), words, archive.digest, len(archive.data)), archive.data

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
        has_started = False
        while not (has_started and self._is_saved):
            try:
                value, number = self._items.get()
            except KeyboardInterrupt:
                self._interrupt(is_confirmed=is_confirmed)
                continue
            if not isinstance(value, Event | ClientError):
                self._show(value)
            elif number != self._orders:
                continue  # of an order that a later one has replaced
            elif isinstance(value, ClientError):
                raise value
            elif value.kind not in _TEXTS:
                return value
            else:
                self._show(_TEXTS[value.kind].format(run=value.run, pods=value.pods))
                is_confirmed = True
                if value.kind == "started":
                    has_started = True
                    self._run = value.run
                    self._started = time.monotonic()
        return None

    def _interrupt(self, *, is_confirmed: bool) -> None:
        """Stop the run at the first Ctrl-C. Raises: KeyboardInterrupt at the second, or before the code has arrived."""
        if not is_confirmed or self._is_stopping:
            end = (
                f"the run may continue: ddp why {self._name}"
                if is_confirmed
                else "the pods did not get all of the code"
            )
            self._display.line(end)
            raise KeyboardInterrupt
        self._is_stopping = True
        self._display.line("stopping the run, and holding the pods; press Ctrl-C again to leave at once")
        self._feed(self._stop())

    def _stop(self) -> Iterator[str]:
        while list(send_order(self._job, Order("stop")))[-1].kind == "refused":
            yield "the run is just being started; trying again"
            time.sleep(_BUSY_SECONDS)

    def _conclude(self, event: Event | None) -> int:
        """Show the end of a run. Returns the exit code. Raises: OrderRefused."""
        assert event is not None  # without --watch
        seconds = time.monotonic() - self._started
        if event.kind == "refused":
            raise OrderRefused("; ".join(filter(None, (event.message, event.remedy))))
        deadline = time.monotonic() + _SECONDS_FOR_LINES
        has_lines = True
        while time.monotonic() < deadline and (has_lines or event.run in self._logs.open_runs.values()):
            has_lines = False
            with suppress(queue.Empty):
                self._show(self._items.get(timeout=_SILENCE_SECONDS).value)
                has_lines = True
        name = self._name
        if has_lines or event.run in self._logs.open_runs.values():
            self._display.line(f"more lines of run {event.run} are not shown here; all are in:  ddp logs {name}")
        self._display.line(describe_outcome(self._job.name, event, seconds))
        if event.message:
            return ExitCode.INTERRUPTED  # the pods run another run
        self._display.line(f"the pods are held; next:  ddp rerun {name}   ddp exec {name}   ddp release {name}")
        return {"Succeeded": ExitCode.OK, "Stopped": ExitCode.INTERRUPTED}.get(event.result, ExitCode.FAILED)

    def _show(self, value: object) -> None:
        """Show what a thread reports, except events."""
        match value:
            case _Saved():
                self._is_saved = True
            case View():
                self._display.update(value)
            case Line() if value.run >= self._run:
                self._display.line(str(value))
            case str():
                self._display.line(f"{time.monotonic() - self._began:6.2f} s  {value}")

    # -- the threads

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """Read the logs, and on a terminal the progress."""
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


def describe_outcome(name: str, event: Event, seconds: float) -> str:
    """Return how a run ended, and for a failure its cause and the remedy as `ddp why` does."""
    end = event.message or {"Succeeded": "succeeded", "Stopped": "was stopped"}.get(event.result, "failed")
    text = f"{name}: run {event.run} {end} after {format_duration(seconds)}"
    failure = event.failure
    if failure is None:
        return text
    places = (("rank", failure.rank), ("pod", failure.pod_index), ("exit code", failure.exit_code))
    cause = sentence(format_failure(failure.category, places, failure.message))
    remedy = sentence(failure.remedy)
    return " ".join(filter(None, (f"{text}: {cause}", remedy[:1].upper() + remedy[1:])))
