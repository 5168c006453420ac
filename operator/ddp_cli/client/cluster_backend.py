"""Jobs in a cluster, through its API server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from ddp_cli.client.api import (
    MERGE_PATCH,
    Api,
    Object,
    api_path,
    call_job,
    find_lease_renewal,
    get_job,
    list_events,
    list_jobs,
    list_pods,
)
from ddp_cli.client.errors import ApiError, ClientError, NotFound
from ddp_cli.client.follow import follow_jobs
from ddp_cli.client.logs import PodLogs
from ddp_cli.client.points import read_points
from ddp_cli.client.workdir import Workdir
from ddp_cli.view.failures import sentence
from ddp_cli.view.why import Why, explain_why
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.parse import parse_status
from ddp_operator.decide.conditions import INIT_CONTAINER_RUNNING
from ddp_operator.reading.containers import find_init_container
from ddp_operator.reading.objects import view_pod

_DELETE: Final = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}


class ClusterBackend:
    """The jobs of one namespace. Every method raises ClientError, and NotFound if the job does not exist."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def find(self, name: str | None) -> tuple[str, Object]:
        """Return a job. Raises: ClientError."""
        if name is None:
            raise ClientError("no job named; pass the name of a job in the cluster")
        return name, get_job(self.api, name)

    def list(self, *, everywhere: bool = False) -> Object:
        """Return the list as the API server does. Raises: ClientError."""
        return list_jobs(self.api, None if everywhere else self.api.namespace)

    def create(
        self,
        text: str,
        workdir: Workdir | None,
        *,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> tuple["ClusterBackend", str, Object]:
        """Create a job in its file's namespace, unless the user named another. Raises: ClientError."""
        from ddp_cli.client.create import create_job

        api, created = create_job(self.api, text, workdir, dry_run=dry_run, note=note)
        return ClusterBackend(api), created["metadata"]["name"], created

    def count_gpus(self) -> None:
        """Return None: only the scheduler knows."""

    def change(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Merge fields into the spec. Raises: ClientError."""
        return call_job(self.api, "PATCH", name, {"spec": spec}, MERGE_PATCH)

    def delete(self, name: str) -> None:
        """Delete a job, and its children in the background. Raises: ClientError."""
        call_job(self.api, "DELETE", name, _DELETE)

    def is_gone(self, name: str) -> bool:
        """Return whether all pods of the job are deleted. Raises: ClientError."""
        return not list_pods(self.api, name)

    def follow(self, name: str, until: float) -> Iterator[Object]:
        """Yield the resource from a watch. Raises: ClientError."""
        for jobs in follow_jobs(self.api, self.api.namespace, name, until=until):
            if (self.api.namespace, name) not in jobs:
                raise NotFound(f"job {name} was deleted")
            yield jobs[self.api.namespace, name]

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> PodLogs:
        """Return the logs of its pods."""
        return PodLogs(self.api, name, node, attempt, tail)

    def metrics(self, name: str) -> Sequence[Mapping[str, float]]:
        """Return the metrics in the status, up to 60 rows, with the columns of metrics.csv. Raises: ClientError."""
        return read_points(parse_status(get_job(self.api, name)).points)

    def why(self, name: str) -> Why:
        """Return the explanation from the resource and its Events. Raises: ClientError."""
        job = get_job(self.api, name)
        lease = find_lease_renewal(self.api)
        why = explain_why(job, find_events(self.api, job), utc_now(), option=self.api.option, lease=lease)
        return _add_init_log(self.api, name, why) if why.reason == INIT_CONTAINER_RUNNING else why

    def argument(self, name: str) -> str:
        """Return the name, with -n if the namespace is not that of the context."""
        return f"{name}{self.api.option}"


def _add_init_log(api: Api, name: str, why: Why) -> Why:
    """Return an explanation with the last line of an init container that keeps a pod from training."""
    with suppress(ApiError):  # no permission to read logs, or the pod was deleted
        for pod in map(view_pod, list_pods(api, name)):
            container = find_init_container(pod)
            if container is None:
                continue
            query = {"container": container.name, "tailLines": "1", "limitBytes": "4096"}
            for text in api.lines(api_path("v1", "pods", api.namespace, pod.name, "log"), query):
                return replace(why, what=f"{why.what} The last line of {container.name} is: {sentence(text)}")
    return why


def find_events(api: Api, job: Object) -> list[Object]:
    """Return the Events of a job; none without the permission to read them. Raises: ClientError."""
    try:
        return list_events(api, job["metadata"])
    except ApiError:  # no permission to read Events; the conditions contain the essentials
        return []
