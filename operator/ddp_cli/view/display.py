"""The output of `ddp run` and `ddp watch` while jobs run: a table with bars on a terminal, else sparse lines."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TextIO

from ddp_cli.view.terminal import build_console, make_printable
from ddp_operator.api.display_texts import format_duration
from ddp_operator.api.status import Progress

_PLAIN_EVERY_SECONDS: Final = 5.0
_NARROW: Final = 80
_COLORS: Final = {"Running": "green", "Succeeded": "bright_green", "Failed": "red", "Rejected": "red"}


@dataclass(frozen=True, slots=True)
class View:
    """The displayed state of a job. ``nodes``: pods that run or have succeeded, and desired ones."""

    phase: str
    attempt: int = 1
    reason: str = ""
    progress: Progress | None = None
    nodes: tuple[int, int] = (0, 0)
    restarts: int = 0

    @property
    def title(self) -> str:
        """The phase, and that a job which succeeded may not have trained as intended."""
        return f"{self.phase} with a warning" if self.phase == "Succeeded" and self.reason else self.phase

    @property
    def color(self) -> str:
        """The color of the phase."""
        return _COLORS.get(self.title, "yellow")

    @property
    def shown_reason(self) -> list[str]:
        """The reason, if no progress is known, steps have stopped, or a success is doubtful; else empty."""
        is_shown = self.reason and (
            self.phase in ("Running", "Held", "Succeeded") or not describe_progress(self.progress)
        )
        return [self.reason] if is_shown else []

    @property
    def percent(self) -> float | None:
        """The finished part of all steps, 0 to 100; None: it is unknown."""
        if self.title == "Succeeded":
            return 100.0
        if self.progress is None or not self.progress.percent:
            return None
        return float(self.progress.percent.rstrip("%"))


class FaultTolerantStream:
    """Standard output that drops text once a write has failed (closed pipe, full disk), so that the run continues."""

    def __init__(self, stream: TextIO, on_loss: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_loss = on_loss
        self._lost = False

    def write(self, text: str) -> int:
        """Write text; return its length."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            action()
        except OSError as error:
            self._lost = True
            # The interpreter would flush its buffer at exit, and a failure of that changes the exit code.
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            self._on_loss(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Display:
    """The interface of displays for a job and lines of text; this class displays nothing."""

    def line(self, text: str) -> None:
        """Print a line of text."""

    def update(self, view: View) -> None:
        """Show the state of the job."""

    def close(self) -> None:
        """Restore the terminal."""


def describe_view(view: View) -> str:
    """Return the state of a job in one line."""
    parts = [view.title]
    if view.attempt > 1:
        parts.append(f"attempt {view.attempt}")
    return "  ".join([*parts, *describe_progress(view.progress), *view.shown_reason])


def describe_progress(progress: Progress | None, *, percent: bool = True) -> list[str]:
    """Return the known values of the progress, one text for each."""
    if progress is None:
        return []
    texts = []
    if progress.epoch is not None:
        texts.append(f"epoch {progress.epoch}" + (f"/{progress.epochs}" if progress.epochs else ""))
    if progress.step is not None:
        texts.append(f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else ""))
    if percent and progress.percent is not None:
        texts.append(progress.percent)
    if progress.eta and progress.step != progress.total_steps:
        texts.append(f"ETA {progress.eta}")
    if progress.loss is not None:
        texts.append(f"loss {progress.loss}")
    if progress.val_accuracy is not None:
        texts.append(f"val acc {progress.val_accuracy}")
    if progress.throughput is not None:
        texts.append(progress.throughput)
    return texts


class PlainDisplay(Display):
    """Lines with a time: at each change of phase, at the first progress, then every few seconds."""

    def __init__(
        self,
        stream: TextIO,
        *,
        name: str = "",
        every: float = _PLAIN_EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._prefix = f"{name}: " if name else ""
        self._every = every
        self._clock = clock
        self._state: tuple[str, int, str] | None = None
        self._progress: Progress | None = None
        self._next = 0.0

    def line(self, text: str) -> None:
        """Print a line."""
        self._stream.write(make_printable(text, colours=True) + "\n")
        self._stream.flush()

    def update(self, view: View) -> None:
        """Print a line if the phase or attempt has changed, at the first progress, or at a change when due."""
        has_progress = bool(describe_progress(view.progress))
        state = (view.phase, view.attempt, "".join(view.shown_reason))
        first = has_progress and not describe_progress(self._progress)
        changed = first or state[:2] != (self._state or ("", 0))[:2]
        due = self._clock() >= self._next
        if not changed and not (due and (view.progress != self._progress or state != self._state)):
            return
        if self._state is not None and not changed and not has_progress and not view.reason:
            return  # the job no longer waits, and has no progress yet
        self._state = state
        self._progress = view.progress
        self._next = self._clock() + self._every
        self.line(f"{time.strftime('%H:%M:%S')} {self._prefix}{describe_view(view)}")


class LiveRegion:
    """The bottom of the terminal, drawn by Rich, with lines of text above it.

    It draws only when it is updated: a refresh thread of Rich would make later forks unsafe.
    """

    def __init__(self, stream: TextIO, *, transient: bool = False) -> None:
        from rich.live import Live

        console = build_console(stream)
        self._live = Live(console=console, auto_refresh=False, transient=transient, vertical_overflow="visible")
        self._live.start()

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._live.console.width

    def line(self, text: str) -> None:
        """Print a line above it."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, renderable: Any) -> None:
        """Redraw it."""
        self._live.update(renderable, refresh=True)

    def close(self) -> None:
        """Leave the last state on the terminal."""
        self._live.stop()


class RichDisplay(Display):
    """A line at the bottom, removed at the end. Rich is imported at the first view, when pods already start."""

    def __init__(self, stream: TextIO, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._name = name
        self._clock = clock
        self._began = clock()
        self._region: LiveRegion | None = None

    def line(self, text: str) -> None:
        """Print a line above it."""
        if self._region is not None:
            self._region.line(text)
        else:
            self._stream.write(make_printable(text, colours=True) + "\n")
            self._stream.flush()

    def update(self, view: View) -> None:
        """Redraw the job."""
        self._region = self._region or LiveRegion(self._stream, transient=True)
        elapsed = format_duration(self._clock() - self._began)
        self._region.show(build_line(self._name, view, elapsed, narrow=self._region.width < _NARROW))

    def close(self) -> None:
        """Remove it."""
        if self._region is not None:
            self._region.close()
            self._region = None


def build_line(name: str, view: View, elapsed: str, *, narrow: bool = False) -> Any:
    """Return the Rich line of one job: a bar and values, or the reason why it waits; cut at the end of the terminal."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    for _ in range(3):
        line.add_column(no_wrap=True)
    line.add_column()  # Rich shrinks a column that may wrap
    values = describe_progress(view.progress, percent=False)
    parts = []
    if view.phase != "Running" or not (values or view.reason):
        parts.append(view.title)
    if view.attempt > 1:
        parts.append(f"attempt {view.attempt}")
    parts += [*values, *view.shown_reason]
    text = Text("  ".join([*parts, elapsed]), no_wrap=True, overflow="ellipsis")

    label = "" if narrow else Text(name, "bold")
    line.add_row(label, *_build_bar(view, 10 if narrow else 24), text)
    return line


def _build_bar(view: View, width: int) -> tuple[Any, str]:
    """Return a bar and the number of percent; both empty if the finished part is unknown."""
    from rich.progress_bar import ProgressBar

    percent = view.percent
    if percent is None:
        return "", ""
    bar = ProgressBar(
        total=100.0, completed=percent, width=width, complete_style=view.color, finished_style=_COLORS["Succeeded"]
    )
    return bar, f"{percent:.1f}%"


def build_table(jobs: Iterable[tuple[tuple[str, str], View]], *, namespaces: bool = False) -> Any:
    """Return the Rich table of jobs by namespace and name; ``namespaces``: with a column for the namespace."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=False)
    heads = ("NAME", "PHASE", "REASON", "NODES", "RESTARTS", "PROGRESS", "")
    for head in ("NAMESPACE", *heads) if namespaces else heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    # On a narrow terminal Rich shrinks columns that may wrap: the values here, not the names.
    table.add_column("")
    for (namespace, name), view in jobs:
        table.add_row(
            *([namespace] if namespaces else []),
            Text(name, "bold"),
            Text(view.phase, view.color),
            view.reason,
            f"{view.nodes[0]}/{view.nodes[1]}",
            str(view.restarts),
            *_build_bar(view, 16),
            Text("  ".join(describe_progress(view.progress, percent=False)), no_wrap=True, overflow="ellipsis"),
        )
    return table if table.row_count else Text("no jobs")


def choose_display(name: str, stream: TextIO, *, quiet: bool, plain: bool) -> Display:
    """Return the display for one job that suits the options and the stream."""
    if quiet:
        return Display()
    if plain or not can_redraw(stream):
        return PlainDisplay(stream)
    return RichDisplay(stream, name)


def can_redraw(stream: TextIO) -> bool:
    """Return whether lines on the stream can be redrawn."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
