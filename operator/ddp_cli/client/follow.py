"""Follow jobs through the API server's watch, and build the view of a state for displays."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ddp_cli.client.api import Api, Object, job_path, list_jobs
from ddp_cli.client.errors import ClientError
from ddp_cli.view.display import View
from ddp_cli.view.why import explain_why
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.nesting import limit_nesting
from ddp_operator.api.stored_fields import read_status
from ddp_operator.decide.input_texts import describe_inputs
from ddp_operator.decide.other_reasons import FETCHING_INPUTS

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
        reason = describe_inputs(status.inputs)
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
    query = {"fieldSelector": f"metadata.name={name}"} if name else {}

    def is_chosen(job: Object) -> bool:
        return name in ("", job["metadata"]["name"])

    path = job_path(namespace)
    yield from follow_objects(
        api, path, query, lambda: list_jobs(api, namespace), keep=is_chosen, until=until, sleep=sleep
    )


def follow_objects(
    api: Api,
    path: str,
    query: Mapping[str, str],
    read_list: Callable[[], Object],
    *,
    keep: Callable[[Object], bool] = lambda item: True,
    until: float = math.inf,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Jobs]:
    """Yield the objects of a list that ``keep`` selects as ``follow_jobs`` does. Raises: ClientError."""
    failures = -_TRIES  # the first failure is final until a call has succeeded
    while True:
        try:
            listing = read_list()
            failures = 0
            objects = {_key(item): item for item in listing["items"] if keep(item)}
            yield dict(objects)
            version = listing["metadata"]["resourceVersion"]
            seconds = math.ceil(min(_WATCH_SECONDS, until - time.monotonic()))
            if seconds <= 0:
                return
            watch = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
            for line in api.lines(path, {**query, **watch}, timeout=seconds + 30):
                event = json.loads(limit_nesting(line.encode()))
                if event["type"] == "ERROR":  # such as 410: the resource version is too old
                    break
                if event["type"] == "DELETED":
                    objects.pop(_key(event["object"]), None)
                elif keep(event["object"]):
                    objects[_key(event["object"])] = event["object"]
                yield dict(objects)
        except (ClientError, ValueError):
            failures += 1
            if failures < 0 or failures >= _TRIES:
                raise
            sleep(_RETRY_SECONDS)


def _key(resource: Object) -> tuple[str, str]:
    return resource["metadata"].get("namespace", ""), resource["metadata"]["name"]
