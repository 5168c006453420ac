"""The interface through which `Client` and `Job` use a cluster or this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ddp_cli.client.logs import Logs
from ddp_cli.client.workdir import Workdir
from ddp_cli.view.why import Why

Object = dict[str, Any]


class Backend(Protocol):
    """Jobs by name. Every method raises ClientError, and NotFound if the job does not exist."""

    def find(self, name: str | None) -> tuple[str, Object]:
        """Return the job's name for later calls, and its resource. None: the newest run on this machine."""

    def list(self, *, everywhere: bool = False) -> Object:
        """Return the list object of the jobs; ``everywhere``: of all namespaces."""

    def create(
        self,
        text: str,
        workdir: Workdir | None,
        *,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> tuple["Backend", str, Object]:
        """Create the job of a YAML with its packed folder.

        Returns the backend for later calls, the job's name and its resource. ``note`` receives a line about each other
        object that was created.
        """

    def count_gpus(self) -> int | None:
        """Return how many GPUs are available for a job; None: unknown."""

    def change(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Set these fields of the spec; return the resource."""

    def delete(self, name: str) -> None:
        """Delete the job; its checkpoints on claims stay."""

    def is_gone(self, name: str) -> bool:
        """Return whether the last pod of a deleted job has ended."""

    def follow(self, name: str, until: float) -> Iterator[Object]:
        """Yield the resource now and after every change, until the time ``until`` of the monotonic clock."""

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> Logs:
        """Return the logs of the selected pods, attempts and lines."""

    def metrics(self, name: str) -> Sequence[Mapping[str, float]]:
        """Return metrics over time; a row lacks the columns that were unknown then."""

    def why(self, name: str) -> Why:
        """Return what the job waits for or why it failed, and what to do."""

    def report(self, name: str, prometheus: str | None = None) -> str:
        """Return the HTML page of `ddp report`; ``prometheus``: the URL of one with the job's series."""

    def argument(self, name: str) -> str:
        """Return the arguments with which a `ddp` command finds the job."""
