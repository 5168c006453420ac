"""Read what the record of an ended job contains: its Events, and the last lines of each rank.

Users control the logs. Their number, size and time are bounded for each job, and the number of jobs that read them.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from ddp_operator.api import constants
from ddp_operator.api.cluster import Cluster
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.api.record import MAX_TEXT, PodLog, Record, keep_end
from ddp_operator.decide.state import Observation
from ddp_operator.decide.views import PodView

LOG_BYTES: Final = 256 << 10
"""Maximum bytes of one response. A longer one lacks the last lines, so fewer lines are requested."""
MAX_PODS: Final = 64
LINES_OF_RANK: Final = 64
_LINES: Final = (2048, 256, 32, 4)
_SECONDS: Final = 20.0
"""For the logs of all pods of a job: the kubelet of a lost node does not respond."""
_AT_ONCE: Final = 8
_RANK: Final = re.compile(r"\S+ (\[[A-Za-z_]+\d+\]:)?")
_EVENT_FIELDS: Final = ("involvedObject", "type", "reason", "message", "firstTimestamp", "lastTimestamp", "eventTime")


async def read_record(cluster: Cluster, job: DDPTrainingJob, observation: Observation, nproc: int) -> Record:
    """Return the record of a job that has ended. ``nproc``: ranks in each pod. Raises: ClusterError."""
    metadata = {"name": job.name, "namespace": job.namespace, "uid": job.uid, "creationTimestamp": job.created}
    resource = {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata}
    events: Sequence[Any] = ()
    with suppress(Refused):  # the conditions contain the essentials
        events = await cluster.events_of(resource)
    failure = job.status.last_failure
    pods = sorted(
        observation.pods_of(job.status.attempt).newest.values() if job.status.attempt else (),
        key=lambda pod: (failure is None or pod.name != failure.pod, pod.phase != "Failed", pod.index),
    )
    logs, notes = await _read_logs(cluster, pods[:MAX_PODS], nproc)
    if len(pods) > MAX_PODS:
        notes.append(f"{len(pods) - MAX_PODS} more pods")
    return Record(
        resource=resource | {"spec": msgspec.to_builtins(job.spec), "status": msgspec.to_builtins(job.status)},
        events=tuple({name: event[name] for name in _EVENT_FIELDS if event.get(name)} for event in events),
        logs=tuple(sorted(logs, key=lambda log: log.node)),
        note="; ".join(notes[:4]),
    )


async def _read_logs(cluster: Cluster, pods: Sequence[PodView], nproc: int) -> tuple[list[PodLog], list[str]]:
    """Return the last lines of each pod, and why those of some pods are missing."""
    logs: list[PodLog] = []
    notes: dict[str, str] = {pod.name: f"{pod.name}: no lines" for pod in pods}
    share = MAX_TEXT // max(1, len(pods))
    gate = asyncio.Semaphore(_AT_ONCE)

    async def read(pod: PodView) -> None:
        data = b""
        try:
            async with gate:
                for lines in _LINES:
                    data = await cluster.read_log(pod.raw, str(find_trainer(pod.raw).get("name")), lines, LOG_BYTES)
                    if len(data) < LOG_BYTES:
                        break
        except (Refused, ClusterError) as error:
            notes[pod.name] = f"{pod.name}: {error}"[:300]
            return
        text = keep_end(choose_lines(data.decode(errors="replace").splitlines()), share)
        if text:
            del notes[pod.name]
            logs.append(PodLog(pod=pod.name, attempt=pod.attempt, node=pod.index, nproc=nproc, text=text))

    with suppress(TimeoutError):  # the notes name the pods
        async with asyncio.timeout(_SECONDS):
            await asyncio.gather(*map(read, pods))
    return logs, list(notes.values())


def choose_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines of each rank, and the last ones without the prefix of a rank, in their order."""
    counts: Counter[str | None] = Counter()
    chosen = []
    for line in reversed(lines):
        match = _RANK.match(line)
        rank = match and match[1]
        counts[rank] += 1
        if counts[rank] <= LINES_OF_RANK:
            chosen.append(line)
    return chosen[::-1]
