"""`ddp watch`: live progress, as bars on a terminal and as lines everywhere else."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TextIO

import msgspec

from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.cli.api import Api, Object, add_cluster_arguments, connect, get_job, job_path, list_jobs
from ddp_operator.cli.io import CommandError, ExitCode
from ddp_operator.display import LiveRegion, PlainDisplay, View, build_table, can_redraw
from ddp_operator.kubeobjects import utc_now
from ddp_operator.why import explain_why

Jobs = dict[tuple[str, str], Object]

_WATCH_SECONDS: Final = 240
_RETRY_SECONDS: Final = 1.0
_TRIES: Final = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="watch one job until it ends; default: all jobs")
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="watch the jobs of all namespaces")
    parser.add_argument("--plain", action="store_true", help="print lines instead of bars, also on a terminal")
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="json: print the resource at every change"
    )
    add_cluster_arguments(parser)
    parser.epilog = "Exit code with NAME: 0 if the job succeeded, 1 if it failed. Without NAME it runs until Ctrl-C."


def run(arguments: argparse.Namespace) -> int:
    """Show the jobs until the named one has ended."""
    if arguments.name and arguments.all_namespaces:
        raise CommandError("-A watches all jobs; use either NAME or -A")
    api = connect(arguments)
    everywhere = arguments.all_namespaces
    screen = choose_screen(sys.stdout, plain=arguments.plain, output=arguments.output, namespaces=everywhere)
    if arguments.name:
        return watch_one(api, arguments.name, screen)
    return _show(follow_jobs(api, None if everywhere else api.namespace), screen)


def watch_one(api: Api, name: str, screen: "Screen | None" = None) -> int:
    """Show one job until it ends; return 0 if it succeeded."""
    get_job(api, name)
    states = follow_jobs(api, api.namespace, name)
    return _show(states, screen or choose_screen(sys.stdout), (api.namespace, name), api.option)


class Screen:
    """Shows jobs."""

    def show(self, jobs: Jobs) -> None:
        """Show this state."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the terminal as it was."""


def _show(states: Iterable[Jobs], screen: "Screen", key: tuple[str, str] | None = None, option: str = "") -> int:
    try:
        for jobs in states:
            screen.show(jobs)
            if key is None:
                continue
            job = jobs.get(key)
            if job is None:
                raise CommandError(f"{key[1]} has been deleted", ExitCode.NOT_FOUND)
            phase = job.get("status", {}).get("phase")
            if phase in ENDED_PHASES:
                screen.close()
                print(explain_why(job, (), utc_now(), option=option), file=sys.stderr)
                return ExitCode.OK if phase == "Succeeded" else ExitCode.FAILED
    finally:
        screen.close()
    return ExitCode.OK


def view_of(job: dict[str, Any]) -> View:
    """Return the state of a resource as it is shown."""
    try:
        status = msgspec.convert(job.get("status") or {}, Status)
    except msgspec.ValidationError:
        return View("Unknown")
    phase = status.phase or "Pending"
    reason = status.reason if status.phase else explain_why(job, (), utc_now()).reason
    nodes = (status.nodes.ready + status.nodes.succeeded, status.nodes.desired or job["spec"].get("nodes", 1))
    return View(phase, status.attempt, reason, status.progress, nodes, restarts=status.restarts.all)


class PlainScreen(Screen):
    """Lines with a time, each with the job's name; figures no more often than every few seconds."""

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
                self._stream.write(json.dumps(job) + "\n")
                self._stream.flush()


class TableScreen(Screen):
    """A table that stays in place, a row and a bar for each job."""

    def __init__(self, stream: TextIO, *, namespaces: bool = False) -> None:
        self._region = LiveRegion(stream)
        self._namespaces = namespaces

    def show(self, jobs: Jobs) -> None:
        """Draw the table anew."""
        self._region.show(build_table(rows_of(jobs), namespaces=self._namespaces))

    def close(self) -> None:
        """Leave the last state on the terminal."""
        self._region.close()


def rows_of(jobs: Jobs) -> Iterator[tuple[tuple[str, str], View]]:
    """Yield the keys and states of jobs, sorted."""
    for key, job in sorted(jobs.items()):
        yield key, view_of(job)


def choose_screen(stream: TextIO, *, plain: bool = False, output: str = "text", namespaces: bool = False) -> Screen:
    """Return the screen that suits the options and the stream; ``namespaces``: it names those of the jobs."""
    if output == "json":
        return JsonScreen(stream)
    screen = TableScreen if not plain and can_redraw(stream) else PlainScreen
    return screen(stream, namespaces=namespaces)


def follow_jobs(
    api: Api, namespace: str | None, name: str = "", *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Jobs]:
    """Yield all jobs (or only ``name``), by namespace and name, now and after every change.

    A server that cannot be reached is retried for half a minute. Raises: CommandError.
    """
    failures = -_TRIES  # at the start the first failure is final
    query = {"fieldSelector": f"metadata.name={name}"} if name else {}
    while True:
        try:
            listing = list_jobs(api, namespace)
            failures = 0
            jobs = {_key(item): item for item in listing["items"] if name in ("", item["metadata"]["name"])}
            yield dict(jobs)
            version = listing["metadata"]["resourceVersion"]
            watch = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(_WATCH_SECONDS)}
            for line in api.lines(job_path(namespace), query | watch, timeout=_WATCH_SECONDS + 30):
                event = json.loads(line)
                if event["type"] == "ERROR":  # such as 410: the resource version is too old
                    break
                if event["type"] == "DELETED":
                    jobs.pop(_key(event["object"]), None)
                elif name in ("", event["object"]["metadata"]["name"]):
                    jobs[_key(event["object"])] = event["object"]
                yield dict(jobs)
        except (CommandError, ValueError):
            failures += 1
            if failures < 0 or failures >= _TRIES:
                raise
            sleep(_RETRY_SECONDS)


def _key(resource: Object) -> tuple[str, str]:
    return resource["metadata"].get("namespace", ""), resource["metadata"]["name"]
