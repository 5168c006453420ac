"""`ddp watch`: live progress, as bars on a terminal and as lines everywhere else."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any, Final, Protocol, TextIO

import msgspec

from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.cli.api import Api, add_cluster_arguments, connect, get_job
from ddp_operator.cli.errors import CommandError, ExitCode
from ddp_operator.cli.following import Jobs, follow_jobs
from ddp_operator.kubeobjects.timestamps import utc_now
from ddp_operator.local.display import PlainDisplay, View, describe_progress
from ddp_operator.why import explain_why

_COLORS: Final = {"Running": "green", "Succeeded": "bright_green", "Failed": "red", "Rejected": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one job, to its end; default: all, until Ctrl-C")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="the jobs of all namespaces")
    parser.add_argument("--plain", action="store_true", help="lines instead of bars, also on a terminal")
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="json: a line with the resource at each change"
    )
    add_cluster_arguments(parser)
    parser.epilog = "With NAME it ends with the job: 0 if that succeeded, 1 if not."


def run(arguments: argparse.Namespace) -> int:
    """Show the jobs until the one that was named has ended."""
    if arguments.name and arguments.all_namespaces:
        raise CommandError("-A shows all jobs; leave it out, or NAME")
    api = connect(arguments)
    screen = choose_screen(sys.stdout, plain=arguments.plain, output=arguments.output)
    if arguments.name:
        return watch_one(api, arguments.name, screen)
    namespace = None if arguments.all_namespaces else api.namespace
    return _show(follow_jobs(api, namespace), screen)


def watch_one(api: Api, name: str, screen: Screen | None = None) -> int:
    """Show one job to its end; return 0 if it succeeded."""
    get_job(api, name)
    return _show(follow_jobs(api, api.namespace, name), screen or choose_screen(sys.stdout), api.namespace, name)


class Screen(Protocol):
    """Where jobs are shown."""

    def show(self, jobs: Jobs) -> None:
        """Show this state."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def _show(states: Iterable[Jobs], screen: Screen, namespace: str = "", name: str = "") -> int:
    try:
        for jobs in states:
            screen.show(jobs)
            if not name:
                continue
            job = jobs.get((namespace, name))
            if job is None:
                raise CommandError(f"{name} has been deleted", ExitCode.NOT_FOUND)
            phase = job.get("status", {}).get("phase")
            if phase in ENDED_PHASES:
                screen.close()
                print(explain_why(job, (), utc_now()), file=sys.stderr)
                return ExitCode.OK if phase == "Succeeded" else ExitCode.FAILED
    finally:
        screen.close()
    return ExitCode.OK


def view_of(job: dict[str, Any]) -> View:
    """Return what there is to show of a resource."""
    try:
        status = msgspec.convert(job.get("status") or {}, Status)
    except msgspec.ValidationError:
        return View("Unknown")
    phase = status.phase or "Pending"
    reason = "" if phase in ("Running", "Succeeded") else explain_why(job, (), utc_now()).reason
    return View(phase, status.attempt, reason, status.progress)


class PlainScreen:
    """Lines with a time, each with the job's name; figures no more often than every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._displays: dict[tuple[str, str], PlainDisplay] = {}

    def show(self, jobs: Jobs) -> None:
        """Print a line for each job of which there is news."""
        for key, job in sorted(jobs.items()):
            if key not in self._displays:
                self._displays[key] = PlainDisplay(self._stream, name=key[1])
            self._displays[key].update(view_of(job))
        for key in sorted(self._displays.keys() - jobs.keys()):
            self._displays.pop(key).line(f"{key[1]}: deleted")

    def close(self) -> None:
        """Nothing to put back."""


class JsonScreen:
    """One line of JSON for each state of each job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._versions: dict[tuple[str, str], str] = {}

    def show(self, jobs: Jobs) -> None:
        """Print the resources that are new or have changed."""
        for key, job in sorted(jobs.items()):
            version = job["metadata"].get("resourceVersion", "")
            if self._versions.get(key) != version:
                self._versions[key] = version
                self._stream.write(json.dumps(job) + "\n")
                self._stream.flush()

    def close(self) -> None:
        """Nothing to put back."""


class RichScreen:
    """A table that stays in place, a row and a bar for each job."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), auto_refresh=False, vertical_overflow="visible")
        self._live.start()

    def show(self, jobs: Jobs) -> None:
        """Draw the table anew."""
        self._live.update(build_table(jobs), refresh=True)

    def close(self) -> None:
        """Leave the last state on the terminal."""
        self._live.stop()


def build_table(jobs: Jobs) -> Any:
    """Return the table of jobs for Rich."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=False)
    for head in ("NAME", "PHASE", "NODES", "PROGRESS", ""):
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    # On a narrow terminal Rich takes the room from columns that may wrap: from the figures here, not from the names.
    table.add_column("")
    for (_, name), job in sorted(jobs.items()):
        view = view_of(job)
        shown = view.progress.percent if view.progress else None
        percent = float(shown.rstrip("%")) if shown else 0.0
        if view.phase == "Succeeded":
            percent = 100.0
        nodes = (job.get("status") or {}).get("nodes") or {}
        wanted = nodes.get("desired") or job["spec"].get("nodes", 1)
        rest = [part for part in describe_progress(view.progress) if part != shown]
        phase = view.phase if view.attempt <= 1 else f"{view.phase} (attempt {view.attempt})"
        table.add_row(
            Text(name, "bold"),
            Text(phase, _COLORS.get(view.phase, "yellow")),
            f"{nodes.get('ready', 0)}/{wanted}",
            ProgressBar(total=100.0, completed=percent, width=24),
            f"{percent:.1f}%",
            Text("  ".join(filter(None, [view.reason, *rest])), no_wrap=True, overflow="ellipsis"),
        )
    return table if jobs else Text("no jobs")


def choose_screen(stream: TextIO, *, plain: bool = False, output: str = "text") -> Screen:
    """Return what suits the options and the stream."""
    if output == "json":
        return JsonScreen(stream)
    return PlainScreen(stream) if plain or not stream.isatty() else RichScreen(stream)
