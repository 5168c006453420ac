"""Follow jobs through the API server's watch, and build the view of a state for displays."""

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from ddp_cli.client.api import Api, Object, job_path, list_jobs
from ddp_cli.client.errors import ClientError
from ddp_cli.view.display import View
from ddp_cli.view.why import explain_why
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.size import limit_nesting
from ddp_operator.api.stored_fields import read_status
from ddp_operator.decide.conditions import FETCHING_INPUTS
from ddp_operator.decide.inputs import describe_progress

Jobs = dict[tuple[str, str], Object]

_WATCH_SECONDS: Final = 240
_RETRY_SECONDS: Final = 1.0
_TRIES: Final = 30


def view_of(job: dict[str, Any]) -> View:
    """Return what displays show of a resource."""
    stored = read_status(job)
    if stored.lacks_phase:
        return View("Unknown")
    status = stored.status
    phase = status.phase or "Pending"
    reason = status.reason if status.phase else explain_why(job, (), utc_now()).reason
    if reason == FETCHING_INPUTS:
        reason = describe_progress(status.inputs)
    nodes = (status.nodes.ready + status.nodes.succeeded, status.nodes.desired or job["spec"].get("nodes", 1))
    return View(phase, status.attempt, reason, status.progress, nodes, restarts=status.restarts.all)


def follow_jobs(
    api: Api,
    namespace: str | None,
    name: str = "",
    *,
    until: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Jobs]:
    """Yield all jobs (or only ``name``), by namespace and name, now and after every change, until the time ``until``.

    ``until``: monotonic time. An unreachable server is retried for 30 seconds. Raises: ClientError.
    """
    failures = -_TRIES  # the first failure is final until a call has succeeded
    query = {"fieldSelector": f"metadata.name={name}"} if name else {}
    while True:
        try:
            listing = list_jobs(api, namespace)
            failures = 0
            jobs = {_key(item): item for item in listing["items"] if name in ("", item["metadata"]["name"])}
            yield dict(jobs)
            version = listing["metadata"]["resourceVersion"]
            seconds = math.ceil(min(_WATCH_SECONDS, until - time.monotonic()))
            if seconds <= 0:
                return
            watch = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
            for line in api.lines(job_path(namespace), query | watch, timeout=seconds + 30):
                event = json.loads(limit_nesting(line.encode()))
                if event["type"] == "ERROR":  # such as 410: the resource version is too old
                    break
                if event["type"] == "DELETED":
                    jobs.pop(_key(event["object"]), None)
                elif name in ("", event["object"]["metadata"]["name"]):
                    jobs[_key(event["object"])] = event["object"]
                yield dict(jobs)
        except (ClientError, ValueError):
            failures += 1
            if failures < 0 or failures >= _TRIES:
                raise
            sleep(_RETRY_SECONDS)


def _key(resource: Object) -> tuple[str, str]:
    return resource["metadata"].get("namespace", ""), resource["metadata"]["name"]
