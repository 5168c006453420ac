"""Jobs in a cluster, by the calls of one API server."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ddp_operator.api.status import Progress
from ddp_operator.client.api import MERGE_PATCH, Api, Object, call_job, get_job, list_events, list_jobs, list_pods
from ddp_operator.client.errors import ApiError, ClientError, NotFound
from ddp_operator.client.follow import follow_jobs
from ddp_operator.client.logs import PodLogs
from ddp_operator.kubeobjects import utc_now
from ddp_operator.why import Why, explain_why

_DELETE: Final = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}


class ClusterBackend:
    """Fulfils ``Backend`` for one namespace."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def find(self, name: str | None) -> tuple[str, Object]:
        """Return a job. Raises: ClientError."""
        if name is None:
            raise ClientError("name the job")
        return name, get_job(self.api, name)

    def list(self, *, everywhere: bool = False) -> Object:
        """Return the list as the API server does. Raises: ClientError."""
        return list_jobs(self.api, None if everywhere else self.api.namespace)

    def change(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Merge fields into the spec. Raises: ClientError."""
        return call_job(self.api, "PATCH", name, {"spec": spec}, MERGE_PATCH)

    def delete(self, name: str) -> None:
        """Delete a job; its children go in the background. Raises: ClientError."""
        call_job(self.api, "DELETE", name, _DELETE)

    def is_gone(self, name: str) -> bool:
        """Tell whether no pod of the job is left. Raises: ClientError."""
        return not list_pods(self.api, name)

    def follow(self, name: str, until: float) -> Iterator[Object]:
        """Yield the resource from a watch. Raises: ClientError."""
        for jobs in follow_jobs(self.api, self.api.namespace, name, until=until):
            if (self.api.namespace, name) not in jobs:
                raise NotFound(f"{name} has been deleted")
            yield jobs[self.api.namespace, name]

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> PodLogs:
        """Return the logs of its pods."""
        return PodLogs(self.api, name, node, attempt, tail)

    def metrics(self, name: str) -> Sequence[Mapping[str, float]]:
        """Return the latest figures as one row, by the names of a run's metrics.csv. Raises: ClientError."""
        status = get_job(self.api, name).get("status") or {}
        progress = msgspec.convert(status.get("progress") or {}, Progress)
        when = progress.last_step_time
        found = {
            "time": when.timestamp() if when else None,
            "attempt": status.get("attempt"),
            "epoch": progress.epoch,
            "step": progress.step,
            "loss": progress.loss,
            "samples_per_second": progress.samples_per_second,
            "steps_per_second": progress.steps_per_second,
            "validation_accuracy": progress.val_accuracy,
            "validation_loss": progress.val_loss,
        }
        return [{column: float(value) for column, value in found.items() if value is not None}] if progress.step else []

    def report(self, name: str) -> str:
        """Raises: ClientError."""
        raise ClientError("a report is of a run on this machine")

    def why(self, name: str) -> Why:
        """Return the explanation of the resource and of the Events about it. Raises: ClientError."""
        job = get_job(self.api, name)
        try:
            events = list_events(self.api, name, job["metadata"]["uid"])
        except ApiError:  # without permission to read Events the conditions still say most
            events = []
        return explain_why(job, events, utc_now(), option=self.api.option)

    def argument(self, name: str) -> str:
        """Return the name, with the namespace where it is not that of the context."""
        return f"{name}{self.api.option}"
