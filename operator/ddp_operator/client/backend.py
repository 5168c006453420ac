"""What runs jobs, as `Client` and `Job` see it: a cluster, or this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ddp_operator.client.logs import Logs
from ddp_operator.client.workdir import Workdir
from ddp_operator.why import Why

Object = dict[str, Any]


class Backend(Protocol):
    """Jobs by name. Every method raises ClientError, and NotFound where there is no such job."""

    def find(self, name: str | None) -> tuple[str, Object]:
        """Return the name by which the job is found from now on, and its resource. None: the newest, if it knows."""

    def list(self, *, everywhere: bool = False) -> Object:
        """Return the list object of the jobs; ``everywhere``: of all namespaces."""

    def create(
        self,
        text: str,
        workdir: Workdir | None,
        *,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda words: None,
    ) -> tuple["Backend", str, Object]:
        """Create the job of a YAML with the folder that it takes along.

        Returns where it is found, its name and its resource. ``note`` is told of what else was made.
        """

    def count_gpus(self) -> int | None:
        """Return how many GPUs there are for a job; None: nobody knows."""

    def change(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Set these fields of the spec; return the resource."""

    def delete(self, name: str) -> None:
        """Delete the job; its checkpoints on claims stay."""

    def is_gone(self, name: str) -> bool:
        """Tell whether the last pod of a deleted job has ended."""

    def follow(self, name: str, until: float) -> Iterator[Object]:
        """Yield the resource now and after every change, to the time ``until`` of the monotonic clock."""

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> Logs:
        """Return what can be read of the logs."""

    def metrics(self, name: str) -> Sequence[Mapping[str, float]]:
        """Return figures over time, each row with those that were known."""

    def why(self, name: str) -> Why:
        """Return what the job waits for or why it failed, and what to do."""

    def report(self, name: str, prometheus: str | None = None) -> str:
        """Return the HTML page of `ddp report`; ``prometheus``: the URL of one that has the job's series."""

    def argument(self, name: str) -> str:
        """Return what a `ddp` command is given to find the job."""
