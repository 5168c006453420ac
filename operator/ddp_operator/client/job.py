"""One job, wherever it runs."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from ddp_operator.api.status import ENDED_PHASES, Phase, Progress, Status
from ddp_operator.client.backend import Backend, Object
from ddp_operator.client.errors import ClientError, Conflict, NotFound, TrainingFailed
from ddp_operator.client.follow import view_of
from ddp_operator.client.logs import Line
from ddp_operator.client.logs import follow as follow_lines
from ddp_operator.client.logs import newest as newest_lines
from ddp_operator.client.notebook import NotebookDisplay, Report, has_notebook, render
from ddp_operator.client.table import Table, make_table
from ddp_operator.display import Display, choose_display
from ddp_operator.why import Why

_POLL_SECONDS: Final = 0.5


class Job:
    """A job of a `Client`. What it says is read when it is asked; ``resource`` is what was read last."""

    def __init__(self, backend: Backend, name: str, resource: Object) -> None:
        self.backend = backend
        self.name = name
        self.resource = resource

    def __repr__(self) -> str:
        phase = (self.resource.get("status") or {}).get("phase", "Pending")
        return f"<Job {self.name}: {phase}>"

    def _repr_html_(self) -> str:
        with suppress(ClientError):  # shown as it was at last
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
        """The status as the operator last wrote it. Raises: NotFound, ClientError."""
        return _status_of(self.refresh().resource)

    @property
    def phase(self) -> Phase:
        """Pending, Rejected, Suspended, Running, Restarting, Succeeded or Failed. Raises: NotFound, ClientError."""
        return self.status.phase or "Pending"

    @property
    def progress(self) -> Progress:
        """Epoch, step, share done, time left, loss and rates, as far as rank 0 reported them. Raises: ClientError."""
        return self.status.progress or Progress()

    def changes(self, timeout: float | None = None) -> Iterator[Status]:
        """Yield the status now and after every change, until the job has ended.

        ``timeout``: seconds. Raises: TimeoutError; NotFound, where it was deleted; ClientError.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        for resource in self.backend.follow(self.name, until):
            self.resource, status = resource, _status_of(resource)
            yield status
            if status.phase in ENDED_PHASES:
                return
        phase = (self.resource.get("status") or {}).get("phase", "Pending")
        raise TimeoutError(f"{self.name} is {phase} after {timeout:g} s; job.why() says what it waits for")

    def wait(self, timeout: float | None = None, *, show: bool | None = None) -> Status:
        """Wait until the job has succeeded; return its last status. Ctrl-C ends the wait, and not the job.

        ``timeout``: seconds. ``show``: a bar and figures meanwhile; None: in a notebook. Raises: TrainingFailed;
        TimeoutError; NotFound, where it was deleted; ClientError.
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
        """Return the figures over time: of a run on this machine a row a second, of a job in a cluster up to 60.

        Columns are those of metrics.csv (time, step, loss, samples_per_second, …), and ``metrics["loss"]`` is one. A
        pandas DataFrame where pandas is installed. Raises: NotFound, ClientError.
        """
        return make_table(self.backend.metrics(self.name))

    def report(self, prometheus: str | None = None) -> Report:
        """Return the HTML report, which a notebook shows inline.

        ``prometheus``: the URL of one that has the series of a job in a cluster, whose status has 60 points of them.
        Raises: NotFound, ClientError.
        """
        return Report(self.backend.report(self.name, prometheus))

    def logs(self, *, follow: bool = False, rank: int | None = None, tail: int | None = None) -> Iterator[str]:
        """Yield the lines of the log, each with the rank that wrote it, or those of one ``rank`` alone.

        ``follow``: until the job has ended, of all attempts; otherwise what the newest attempt has written. ``tail``:
        only the last lines of each pod. Raises: NotFound, where there is no log; ClientError.
        """
        for line in self.lines(follow=follow, tail=tail):
            if rank is None:
                yield str(line)
            elif line.prefix == f"rank {rank}":
                yield line.text

    def lines(
        self, *, follow: bool = False, node: int | None = None, attempt: int | None = None, tail: int | None = None
    ) -> Iterator[Line]:
        """Yield the same as values, with the kubelet's times; of one pod or attempt, where that is given."""
        source = self.backend.logs(self.name, node=node, attempt=attempt, tail=tail)
        empty = True
        for line in follow_lines(source) if follow else newest_lines(source):
            empty = False
            yield line
        if empty and not follow and not source.pods():
            hint = f"`ddp why {self.backend.argument(self.name)}` says what it waits for"
            raise NotFound(f"no pods of {self.name} match; {hint}")

    def why(self) -> Why:
        """Return what the job waits for or why it failed, and what to do. Raises: ClientError."""
        return self.backend.why(self.name)

    @property
    def links(self) -> tuple[str, ...]:
        """Pages of the job's run in MLflow and W&B, as far as its pods have named them. Raises: ClientError."""
        tracking = self.status.tracking
        return tracking.links if tracking is not None else ()

    def scale(self, nodes: int) -> None:
        """Change the number of pods. Raises: Conflict, where the job has ended; ClientError."""
        self._change(nodes=nodes)

    def suspend(self) -> None:
        """Stop the pods after a checkpoint. Raises: Conflict, where the job has ended; ClientError."""
        self._change(suspend=True)

    def resume(self) -> None:
        """Let a suspended job go on. Raises: Conflict, where the job has ended; ClientError."""
        self._change(suspend=False)

    def _change(self, **fields: Any) -> None:
        phase = self.phase
        if phase in ("Succeeded", "Failed"):
            raise Conflict(f"{self.name} has ended ({phase}) and cannot be changed; delete it and submit it again")
        spec = self.resource["spec"]
        if any(spec.get(name, False) != value for name, value in fields.items()):
            self.resource = self.backend.change(self.name, fields)

    def delete(self, *, wait: bool = False) -> None:
        """Delete the job and what was made for it; checkpoints on claims stay. ``wait``: until its last pod is gone.

        Raises: NotFound, ClientError.
        """
        self.backend.delete(self.name)
        if wait:
            self.wait_until_gone()

    def wait_until_gone(self) -> None:
        """Wait until the last pod of a deleted job has ended. Raises: ClientError."""
        while not self.backend.is_gone(self.name):
            time.sleep(_POLL_SECONDS)


def _status_of(resource: Object) -> Status:
    """Return the status, with a progress whose values are None where the script has reported none."""
    try:
        status = msgspec.convert(resource.get("status") or {}, Status)
    except msgspec.ValidationError as error:
        name = resource["metadata"]["name"]
        raise ClientError(f"{name} has a status that this version of ddp cannot read ({error}); update it") from None
    return status if status.progress is not None else msgspec.structs.replace(status, progress=Progress())
