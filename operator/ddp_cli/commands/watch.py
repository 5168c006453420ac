"""`ddp watch`: show live progress, as bars on a terminal and as lines elsewhere."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TextIO

from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.follow import Jobs, follow_jobs, view_of
from ddp_cli.client.job import Job
from ddp_cli.commands.arguments import add_cluster_arguments, add_local_arguments, is_local, open_client, open_job
from ddp_cli.commands.io import CommandError, ExitCode
from ddp_cli.view.display import LiveRegion, PlainDisplay, View, build_table, can_redraw
from ddp_cli.view.terminal import make_printable, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="watch one job or run until it ends; default: all jobs of the namespace, or the newest run",
    )
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="watch the jobs of all namespaces")
    parser.add_argument("--plain", action="store_true", help="print lines instead of bars, also on a terminal")
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="json: print the resource after every change"
    )
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)
    parser.epilog = "All jobs of a namespace are watched until Ctrl-C."


def run(arguments: argparse.Namespace) -> int:
    """Show all jobs until Ctrl-C, or one until it ends."""
    if arguments.name and arguments.all_namespaces:
        raise CommandError("-A watches all jobs; leave out -A or NAME")
    local = is_local(arguments)
    if local and arguments.all_namespaces:
        raise CommandError("-A watches the jobs of a cluster, and no cluster is configured; use --kubeconfig")
    client = open_client(arguments, local=local)
    everywhere = arguments.all_namespaces
    screen = choose_screen(sys.stdout, plain=arguments.plain, output=arguments.output, namespaces=everywhere)
    if arguments.name or local:
        return watch_one(client.get(arguments.name) if local else open_job(arguments), screen)
    assert isinstance(client.backend, ClusterBackend)
    api = client.backend.api
    try:
        for jobs in follow_jobs(api, None if everywhere else api.namespace):
            screen.show(jobs)
    finally:
        screen.close()
    return ExitCode.OK


def watch_one(job: Job, screen: "Screen | None" = None) -> int:
    """Show one job until it ends; return 0 if it succeeded."""
    screen = screen or choose_screen(sys.stdout)
    try:
        for _ in job.changes():
            screen.show({(job.resource["metadata"].get("namespace", ""), job.name): job.resource})
    finally:
        screen.close()
    print_text(job.why(), file=sys.stderr)
    return ExitCode.OK if job.resource["status"]["phase"] == "Succeeded" else ExitCode.FAILED


class Screen:
    """Shows jobs."""

    def show(self, jobs: Jobs) -> None:
        """Show this state."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainScreen(Screen):
    """Lines with a time and the job's name; progress at most every few seconds."""

    def __init__(self, stream: TextIO, *, namespaces: bool = False) -> None:
        self._stream = stream
        self._namespaces = namespaces
        self._displays: dict[tuple[str, str], PlainDisplay] = {}

    def show(self, jobs: Jobs) -> None:
        """Print a line for each job that has changed."""
        for key, job in sorted(jobs.items()):
            if key not in self._displays:
                self._displays[key] = PlainDisplay(self._stream, name=self._name(key))
            self._displays[key].update(view_of(job))
        for key in sorted(self._displays.keys() - jobs.keys()):
            self._displays.pop(key).line(f"{self._name(key)}: deleted")

    def _name(self, key: tuple[str, str]) -> str:
        return "/".join(key if self._namespaces else key[1:])


class JsonScreen(Screen):
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
                self._stream.write(make_printable(json.dumps(job)) + "\n")
                self._stream.flush()


class TableScreen(Screen):
    """A table that stays in place, a row and a bar for each job."""

    def __init__(self, stream: TextIO, *, namespaces: bool = False) -> None:
        self._region = LiveRegion(stream)
        self._namespaces = namespaces

    def show(self, jobs: Jobs) -> None:
        """Redraw the table."""
        self._region.show(build_table(rows_of(jobs), namespaces=self._namespaces))

    def close(self) -> None:
        """Leave the last state on the terminal."""
        self._region.close()


def rows_of(jobs: Jobs) -> Iterator[tuple[tuple[str, str], View]]:
    """Yield the keys and states of jobs, sorted."""
    for key, job in sorted(jobs.items()):
        yield key, view_of(job)


def choose_screen(stream: TextIO, *, plain: bool = False, output: str = "text", namespaces: bool = False) -> Screen:
    """Return the screen for these options and this stream; ``namespaces``: show the jobs' namespaces."""
    if output == "json":
        return JsonScreen(stream)
    screen = TableScreen if not plain and can_redraw(stream) else PlainScreen
    return screen(stream, namespaces=namespaces)
