"""One job, in a cluster or on this machine."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ddp_cli.client.api import Object
from ddp_cli.client.errors import ClientError, Conflict, NotFound, TrainingFailed, warn_of_left_out
from ddp_cli.client.follow import view_of
from ddp_cli.client.hooks import open_reports
from ddp_cli.client.logs import Follower, Line, read_newest
from ddp_cli.client.notebook import NotebookDisplay, Report, Table, has_notebook, render
from ddp_cli.view.display import Display, choose_display
from ddp_cli.view.why import Why
from ddp_operator.api.resources import find_worker_cluster
from ddp_operator.api.status import ENDED_PHASES, Phase, Progress, Status
from ddp_operator.api.stored_fields import read_status

if TYPE_CHECKING:
    from ddp_cli.client.cluster_backend import ClusterBackend
    from ddp_cli.client.local import LocalBackend

    Backend = ClusterBackend | LocalBackend  # have the same methods, by the name of a job

_POLL_SECONDS: Final = 0.5


class Job:
    """A job of a `Client`. Its properties read the current state; ``resource`` is the resource as last read."""

    def __init__(self, backend: "Backend", name: str, resource: Object) -> None:
        self.backend = backend
        self.name = name
        self.resource = resource

    def __repr__(self) -> str:
        phase = (self.resource.get("status") or {}).get("phase", "Pending")
        return f"<Job {self.name}: {phase}>"

    def _repr_html_(self) -> str:
        with suppress(ClientError):  # then show the last known state
            self.refresh()
        ended = (self.resource.get("status") or {}).get("phase") in ("Failed", "Rejected")
        explanation = ""
        if ended:
            with suppress(ClientError):
                explanation = str(self.why())
        return render(self.name, view_of(self.resource), explanation)

    def refresh(self) -> "Job":
        """Read the resource again. Raises: NotFound, ClientError."""
        _, self.resource = self.backend.find(self.name)
        return self

    @property
    def status(self) -> Status:
        """The current status. Raises: NotFound, ClientError."""
        return _read_status(self.refresh().resource)

    @property
    def phase(self) -> Phase:
        """Pending, Rejected, Suspended, Running, Restarting, Succeeded or Failed. Raises: NotFound, ClientError."""
        return self.status.phase or "Pending"

    @property
    def progress(self) -> Progress:
        """Epoch, step, progress, ETA, loss and rates, as far as rank 0 reports them. Raises: ClientError."""
        return self.status.progress or Progress()

    def changes(self, timeout: float | None = None) -> Iterator[Status]:
        """Yield the status now and after every change, until the job has ended.

        ``timeout``: seconds. Raises: TimeoutError; NotFound, if it was deleted; ClientError.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        for resource in self.backend.follow(self.name, until):
            self.resource = resource
            status = _read_status(resource)
            yield status
            if status.phase in ENDED_PHASES:
                return
        phase = (self.resource.get("status") or {}).get("phase", "Pending")
        raise TimeoutError(f"{self.name} is {phase} after {timeout:g} s; job.why() explains the reason")

    def wait(self, timeout: float | None = None, *, show: bool | None = None) -> Status:
        """Wait until the job has succeeded; return its last status. Ctrl-C ends the wait, but not the job.

        ``timeout``: seconds. ``show``: display a progress bar meanwhile; None: only in a notebook. Raises:
        TrainingFailed; TimeoutError; NotFound, if it was deleted; ClientError.
        """
        display = Display()
        if has_notebook() and show is not False:
            display = NotebookDisplay(self.name)
        elif show:
            display = choose_display(self.name, sys.stdout, quiet=False, plain=False)
        try:
            for state in self.changes(timeout):
                status = state
                display.update(view_of(self.resource))
        finally:
            display.close()
        if status.phase != "Succeeded":
            raise TrainingFailed(str(self.why()), status)
        return status

    def metrics(self) -> Table:
        """Return the metrics over time: a row per second for a run on this machine, up to 60 for a job in a cluster.

        The columns are those of metrics.csv (time, step, loss, samples_per_second, …); ``metrics["loss"]`` is one.
        Raises: NotFound, ClientError.
        """
        return Table(dict(row) for row in self.backend.metrics(self.name))

    def report(self, prometheus: str | None = None, *, run: int | None = None) -> Report:
        """Return the HTML report, which a notebook shows inline.

        ``prometheus``: the URL of a Prometheus with the series of a job in a cluster; its status has 60 points only.
        ``run``: the number of one run of a job of `ddp dev`; former ones are read in pod 0. Raises: NotFound,
        ClientError.
        """
        return Report(open_reports().build_job_report(self, prometheus, run))

    def logs(self, *, follow: bool = False, rank: int | None = None, tail: int | None = None) -> Iterator[str]:
        """Yield the lines of the log, each with the rank that wrote it, or the lines of one ``rank`` without it.

        ``follow``: the lines of all attempts until the job has ended; else those of the newest attempt so far.
        ``tail``: only the last lines of each pod. Raises: NotFound, if there is no log; ClientError.
        """
        for line in self.lines(follow=follow, tail=tail):
            if rank is None:
                yield str(line)
            elif line.prefix == f"rank {rank}":
                yield line.text

    def lines(
        self, *, follow: bool = False, node: int | None = None, attempt: int | None = None, tail: int | None = None
    ) -> Iterator[Line]:
        """Yield the same lines as values with the kubelet's times, optionally of one pod or attempt."""
        self.require_pods_here()
        source = self.backend.logs(self.name, node=node, attempt=attempt, tail=tail)
        empty = True
        for line in Follower(source).lines() if follow else read_newest(source):
            empty = False
            yield line
        if empty and not follow and not source.pods():
            command = f"ddp why {self.backend.argument(self.name)}"
            raise NotFound(f"{self.name} has no matching pod with a log; `{command}` explains what the job waits for")

    def require_pods_here(self) -> None:
        """Raise Conflict if MultiKueue runs the pods in another cluster."""
        cluster = find_worker_cluster(self.resource)
        if cluster and self.phase not in ENDED_PHASES:
            problem = f"the pods of {self.name} are in cluster {cluster} (MultiKueue)"
            raise Conflict(f"{problem}; repeat the command with the context of that cluster: --context NAME")

    def why(self) -> Why:
        """Return what the job waits for or why it failed, and what to do. Raises: ClientError."""
        return self.backend.why(self.name)

    @property
    def links(self) -> tuple[str, ...]:
        """URLs of the job's run in MLflow and W&B, as far as its pods have reported them. Raises: ClientError."""
        tracking = self.status.tracking
        return tracking.links if tracking is not None else ()

    def scale(self, nodes: int) -> None:
        """Change the number of pods. Raises: Conflict, if the job has ended; ClientError."""
        self._change(nodes=nodes)

    def suspend(self) -> None:
        """Stop the pods after a checkpoint. Raises: Conflict, if the job has ended; ClientError."""
        self._change(suspend=True)

    def resume(self) -> None:
        """Resume a suspended job. Raises: Conflict, if the job has ended; ClientError."""
        self._change(suspend=False)

    def _change(self, **fields: Any) -> None:
        phase = self.phase
        if phase in ("Succeeded", "Failed"):
            raise Conflict(f"{self.name} has ended ({phase}) and cannot be changed; delete it and create it again")
        spec = self.resource["spec"]
        if any(spec.get(name, False) != value for name, value in fields.items()):
            self.resource = self.backend.change(self.name, fields)

    def delete(self, *, wait: bool = False) -> None:
        """Delete the job and its objects, but not checkpoints on claims. ``wait``: until its last pod has ended.

        Raises: NotFound, ClientError.
        """
        self.backend.delete(self.name)
        if wait:
            self.wait_until_gone()

    def wait_until_gone(self) -> None:
        """Wait until the last pod of the deleted job has ended. Raises: ClientError."""
        while not self.backend.is_gone(self.name):
            time.sleep(_POLL_SECONDS)


def _read_status(resource: Object) -> Status:
    """Return the status; its progress is never None, but may have no values."""
    stored = read_status(resource)
    warn_of_left_out(resource["metadata"]["name"], stored.left_out)
    status = stored.status
    return status if status.progress is not None else msgspec.structs.replace(status, progress=Progress())
