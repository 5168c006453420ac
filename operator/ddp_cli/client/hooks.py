"""What features add to the commands and to jobs. The kernel calls them by these types, and imports no feature.

A feature is a folder of ``ddp_cli.features`` and an entry of its tuple (docs/adr/0056-features-behind-hooks.md), which
names modules instead of importing them: `ddp --help` and completion load none, and a broken one ends its commands only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

from ddp_cli.client.errors import ClientError

if TYPE_CHECKING:
    from ddp_cli.client.job import Job
    from ddp_pod.contract.report import PodReport


class Command(NamedTuple):
    """A subcommand of `ddp`. Its module has add_arguments(parser) and run(arguments) -> exit code."""

    name: str
    module: str
    help: str
    after: str = ""
    """The command of the kernel that the list of commands names before this one."""
    script: Literal["", "file", "arguments"] = ""
    """What it takes of a training script: its file, or new arguments after --."""


class CommandFeature(NamedTuple):
    """What one folder of ``ddp_cli.features`` adds. ``page``: its page in docs."""

    name: str
    maturity: Literal["stable", "beta", "experimental"]
    page: str
    commands: tuple[Command, ...] = ()
    reports: str = ""
    """A module with the functions of `Reports`."""
    former_runs: str = ""
    """A module with the function of `FormerRuns`."""


class Reports(Protocol):
    """Draws the HTML page of a run or job."""

    def build_job_report(self, job: Job, prometheus: str | None, run: int | None) -> str:
        """Return the page of a job, or of one run of a job of `ddp dev`. Raises: ClientError."""
        ...


class FormerRuns(Protocol):
    """Reads what a job's pods keep of its former runs."""

    def list_former_runs(self, job: Job) -> Sequence[PodReport]:
        """Return the reports on the former runs; none if pod 0 does not run. Raises: ClientError."""
        ...


_used: tuple[CommandFeature, ...] = ()


def use_features(features: Iterable[CommandFeature]) -> None:
    """Have this process use these features. `ddp` and the package call it, which may import the list."""
    global _used
    _used = tuple(features)


def draws_reports() -> bool:
    """Return whether a feature draws reports."""
    return any(feature.reports for feature in _used)


def open_reports() -> Reports:
    """Return what draws reports. Raises: ClientError, if no feature does."""
    for feature in _used:
        if feature.reports:
            return cast(Reports, importlib.import_module(feature.reports))
    raise ClientError("this installation of ddp has no feature that draws reports; `ddp why` explains the job's state")


def list_former_runs(job: Job) -> Sequence[PodReport]:
    """Return the reports on a job's former runs, from the features that keep any. Raises: ClientError."""
    readers = [importlib.import_module(feature.former_runs) for feature in _used if feature.former_runs]
    return [report for reader in readers for report in cast(FormerRuns, reader).list_former_runs(job)]
