"""Follow the jobs of a namespace: list, then watch; list again when the watch ends."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Final

from ddp_operator.cli.api import Api, Object, job_path, list_jobs
from ddp_operator.cli.errors import CommandError

Jobs = dict[tuple[str, str], Object]

_WATCH_SECONDS: Final = 240
_RETRY_SECONDS: Final = 1.0
_TRIES: Final = 30


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
