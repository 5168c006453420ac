"""What `ddp run` and `ddp watch` show while jobs run: a table with bars on a terminal, sparse lines everywhere else."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TextIO

from ddp_operator.api.status import Progress
from ddp_operator.progress import format_duration
from ddp_operator.terminal import build_console, make_printable

_PLAIN_EVERY_SECONDS: Final = 5.0
_NARROW: Final = 80
_COLORS: Final = {"Running": "green", "Succeeded": "bright_green", "Failed": "red", "Rejected": "red"}


@dataclass(frozen=True, slots=True)
class View:
    """The state of a job as it is shown. ``nodes``: pods that run or have succeeded, and desired ones."""

    phase: str
    attempt: int = 1
    reason: str = ""
    progress: Progress | None = None
    nodes: tuple[int, int] = (0, 0)
    restarts: int = 0

    @property
    def percent(self) -> float:
        """The finished part of all steps, 0 to 100."""
        if self.phase == "Succeeded":
            return 100.0
        return float(self.progress.percent.rstrip("%")) if self.progress and self.progress.percent else 0.0


class FaultTolerantStream:
    """Standard output that goes quiet once it cannot be written (closed pipe, full disk): no run ends for that."""

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
            # The interpreter's own flush of what is still buffered would change the exit code.
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            self._on_loss(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Display:
    """Shows a job and lines of text; this one shows nothing."""

    def line(self, text: str) -> None:
        """Print a line of text as it is."""

    def update(self, view: View) -> None:
        """Show the state of the job."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def describe_view(view: View) -> str:
    """Return the state of a job in one line."""
    parts = [view.phase]
    if view.attempt > 1:
        parts.append(f"attempt {view.attempt}")
    return "  ".join(parts + (describe_progress(view.progress) or ([view.reason] if view.reason else [])))


def describe_progress(progress: Progress | None, *, percent: bool = True) -> list[str]:
    """Return what is known of the progress, part by part."""
    p = progress or Progress()
    return [
        text
        for known, text in (
            (p.epoch, f"epoch {p.epoch}" + (f"/{p.epochs}" if p.epochs else "")),
            (p.step, f"step {p.step}" + (f"/{p.total_steps}" if p.total_steps else "")),
            (p.percent if percent else None, p.percent or ""),
            (p.eta_seconds or None, f"ETA {p.eta}"),
            (p.loss, f"loss {p.loss}"),
            (p.val_accuracy, f"val acc {p.val_accuracy}"),
            (p.samples_per_second, f"{p.samples_per_second} samples/s"),
            (None if p.samples_per_second else p.steps_per_second, f"{p.steps_per_second} steps/s"),
        )
        if known is not None
    ]


class PlainDisplay(Display):
    """Lines with a time: one for each change of phase, one for the first progress, then one every few seconds."""

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
        """Print a line where the phase or attempt has changed, at the first progress, or for any change when due."""
        has_progress = bool(describe_progress(view.progress))
        state = (view.phase, view.attempt, "" if has_progress else view.reason)
        first = has_progress and not describe_progress(self._progress)
        changed = first or state[:2] != (self._state or ("", 0))[:2]
        due = self._clock() >= self._next
        if not changed and not (due and (view.progress != self._progress or state != self._state)):
            return
        if self._state is not None and not changed and not has_progress and not view.reason:
            return  # what it waited for has come: nothing to read
        self._state, self._progress, self._next = state, view.progress, self._clock() + self._every
        self.line(f"{time.strftime('%H:%M:%S')} {self._prefix}{describe_view(view)}")


class LiveRegion:
    """The bottom of the terminal, drawn by Rich, with lines of text above it.

    It draws only when it is updated: a thread of Rich's own would make later forks unsafe.
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
        """Draw it anew."""
        self._live.update(renderable, refresh=True)

    def close(self) -> None:
        """Leave the last state on the terminal."""
        self._live.stop()


class RichDisplay(Display):
    """A line at the bottom, gone at the end. Rich is imported at the first view, when pods are already starting."""

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
        """Draw the job anew."""
        self._region = self._region or LiveRegion(self._stream, transient=True)
        elapsed = format_duration(self._clock() - self._began)
        self._region.show(build_line(self._name, view, elapsed, narrow=self._region.width < _NARROW))

    def close(self) -> None:
        """Remove it."""
        if self._region is not None:
            self._region.close()
            self._region = None


def build_line(name: str, view: View, elapsed: str, *, narrow: bool = False) -> Any:
    """Return the Rich line of one job: a bar and figures, or what it waits for. What has no room is cut at the end."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    for _ in range(3):
        line.add_column(no_wrap=True)
    line.add_column()  # Rich takes the room from a column that may wrap
    figures = describe_progress(view.progress, percent=False)
    state = [] if view.phase == "Running" and (figures or view.reason) else [view.phase]
    state += [f"attempt {view.attempt}"] if view.attempt > 1 else []
    words = [*state, *figures, elapsed] if figures else [*state, *filter(None, [view.reason]), elapsed]
    text = Text("  ".join(words), no_wrap=True, overflow="ellipsis")
    bar = _build_bar(view, 10 if narrow else 24)
    percent = f"{view.percent:.1f}%" if figures else ""
    line.add_row(Text(name, "bold") if not narrow else "", bar if percent else "", percent, text)
    return line


def _build_bar(view: View, width: int) -> Any:
    from rich.progress_bar import ProgressBar

    color = _COLORS.get(view.phase, "yellow")
    return ProgressBar(
        total=100.0, completed=view.percent, width=width, complete_style=color, finished_style=_COLORS["Succeeded"]
    )


def build_table(jobs: Iterable[tuple[tuple[str, str], View]], *, namespaces: bool = False) -> Any:
    """Return the Rich table of jobs, by namespace and name, and state; ``namespaces``: with a column of those."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=False)
    heads = ("NAME", "PHASE", "REASON", "NODES", "RESTARTS", "PROGRESS", "")
    for head in ("NAMESPACE", *heads) if namespaces else heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    # On a narrow terminal Rich takes the room from columns that may wrap: from the figures here, not from the names.
    table.add_column("")
    for (namespace, name), view in jobs:
        table.add_row(
            *([namespace] if namespaces else []),
            Text(name, "bold"),
            Text(view.phase, _COLORS.get(view.phase, "yellow")),
            view.reason,
            f"{view.nodes[0]}/{view.nodes[1]}",
            str(view.restarts),
            _build_bar(view, 16),
            f"{view.percent:.1f}%",
            Text("  ".join(describe_progress(view.progress, percent=False)), no_wrap=True, overflow="ellipsis"),
        )
    return table if table.row_count else Text("no jobs")


def choose_display(name: str, stream: TextIO, *, quiet: bool, plain: bool) -> Display:
    """Return the display for one job that suits the options and the stream."""
    if quiet:
        return Display()
    return RichDisplay(stream, name) if not plain and can_redraw(stream) else PlainDisplay(stream)


def can_redraw(stream: TextIO) -> bool:
    """Return whether lines that are already on the stream can be drawn anew."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
