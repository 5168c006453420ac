"""What `ddp run` shows while a job runs: a progress bar on a terminal, sparse lines everywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TextIO

from ddp_operator.api.status import Progress

_PLAIN_EVERY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class View:
    """What there is to show now."""

    phase: str
    attempt: int = 1
    reason: str = ""
    progress: Progress | None = None


class Screen:
    """Standard output that goes quiet where nobody reads it any more, or its disk is full: no run ends for that."""

    def __init__(self, stream: TextIO, on_loss: Callable[[OSError], None]) -> None:
        self._stream = stream
        self._on_loss = on_loss
        self._lost = False

    def write(self, text: str) -> int:
        """Write text; return its length."""
        if not self._lost:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        if not self._lost:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._lost = True
        # What is still in its buffer goes nowhere: the interpreter's own flush at the end would change the exit code.
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._on_loss(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Display(Protocol):
    """Shows views and lines."""

    def line(self, text: str) -> None:
        """Print a line of text as it is."""
        ...

    def update(self, view: View) -> None:
        """Show how far the job is."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def describe_view(view: View) -> str:
    """Return one line about how far the job is."""
    words = [view.phase]
    if view.attempt > 1:
        words.append(f"attempt {view.attempt}")
    words += describe_progress(view.progress) or ([view.reason] if view.reason else [])
    return "  ".join(words)


def describe_progress(progress: Progress | None) -> list[str]:
    """Return what is known of the progress, part by part."""
    p = progress or Progress()
    return [
        text
        for known, text in (
            (p.epoch, f"epoch {p.epoch}" + (f"/{p.epochs}" if p.epochs else "")),
            (p.step, f"step {p.step}" + (f"/{p.total_steps}" if p.total_steps else "")),
            (p.percent, p.percent or ""),
            (p.eta_seconds or None, f"ETA {p.eta}"),
            (p.loss, f"loss {p.loss}"),
            (p.val_accuracy, f"val acc {p.val_accuracy}"),
            (p.samples_per_second, f"{p.samples_per_second} samples/s"),
            (None if p.samples_per_second else p.steps_per_second, f"{p.steps_per_second} steps/s"),
        )
        if known is not None
    ]


class PlainDisplay:
    """Lines with a time: one for each change of phase, one for the first progress, then one each few seconds."""

    def __init__(
        self,
        stream: TextIO,
        *,
        name: str = "",
        every: float = _PLAIN_EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._head = f"{name}: " if name else ""
        self._every = every
        self._clock = clock
        self._said: tuple[str, int, str] | None = None
        self._shown: Progress | None = None
        self._next = 0.0

    def line(self, text: str) -> None:
        """Print a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def update(self, view: View) -> None:
        """Print a line where the phase has changed or figures come up, or where there is news and the time has come."""
        told = bool(describe_progress(view.progress))
        state = (view.phase, view.attempt, "" if told else view.reason)
        first = told and not describe_progress(self._shown)
        changed = first or state[:2] != (self._said or ("", 0))[:2]
        due = self._clock() >= self._next
        news = view.progress != self._shown or state != self._said
        if not changed and not (due and news):
            return
        self._said, self._shown, self._next = state, view.progress, self._clock() + self._every
        self.line(f"{time.strftime('%H:%M:%S')} {self._head}{describe_view(view)}")

    def close(self) -> None:
        """Nothing to put back."""


class QuietDisplay:
    """Shows nothing."""

    def line(self, text: str) -> None:
        """Ignore it."""

    def update(self, view: View) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Nothing to put back."""


class RichDisplay:
    """A progress bar and a line of figures that stay at the bottom, drawn by Rich.

    Rich is imported with the first view, when the pods are already starting, and draws only when it is told to: its
    own thread would make later forks unsafe.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._live: Any = None
        self._bar: Any = None
        self._task: Any = None

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._live is None:
            self._stream.write(text + "\n")
            self._stream.flush()
        else:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, view: View) -> None:
        """Draw bar and figures anew."""
        if self._live is None:
            self._start()
        from rich.console import Group
        from rich.text import Text

        shown = view.progress.percent if view.progress else None
        phase = view.phase if view.attempt <= 1 else f"{view.phase} (attempt {view.attempt})"
        self._bar.update(self._task, completed=float(shown.rstrip("%")) if shown else 0.0, phase=phase)
        rest = [part for part in describe_progress(view.progress) if part != shown]
        figures = Text("  " + ("  ".join(rest) or view.reason), no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._bar, figures), refresh=True)

    def close(self) -> None:
        """Leave the last state on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[phase]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>5.1f}%"),
            TimeElapsedColumn(),
            auto_refresh=False,
        )
        self._task = self._bar.add_task(self._name, total=100.0, phase="")
        self._live = Live(self._bar, console=Console(file=self._stream), auto_refresh=False)
        self._live.start()


def choose_display(name: str, *, quiet: bool, plain: bool, stream: TextIO = sys.stderr) -> Display:
    """Return what suits the options and the stream."""
    if quiet:
        return QuietDisplay()
    if plain or not stream.isatty():
        return PlainDisplay(stream)
    return RichDisplay(stream, name)
