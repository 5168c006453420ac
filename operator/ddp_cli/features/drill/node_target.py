"""A job in a cluster of which a node is to be cut off: its status, and samples of pod 0, whichever node has it."""

import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from ddp_cli.client.api import Api, get_job, list_pods
from ddp_cli.client.errors import ClientError
from ddp_cli.client.logs import LogPod, log_pod
from ddp_cli.commands.io import CommandError, ExitCode
from ddp_cli.features.drill.lost_node import ChosenPod, JobFacts, Sighting
from ddp_cli.features.drill.pods import RunEnded, build_probe_command, execute_in_pod
from ddp_cli.features.drill.recovery import parse_sample
from ddp_operator.api.cluster import Object
from ddp_operator.api.parse import parse_status
from ddp_operator.api.resources import find_metrics_port
from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import other_reasons

_POLL_SECONDS: Final = 0.5
_PROBE_SECONDS: Final = 0.2


class NodeTarget:
    """A job and the completion index of the pod whose node is cut off."""

    def __init__(self, api: Api, name: str, index: int) -> None:
        self._api = api
        self._name = name
        self._index = index
        self._samples: queue.Queue[Sighting] = queue.Queue()
        self._followed: set[str] = set()

    def choose(self) -> ChosenPod:
        """Return the running pod of the index. Raises: CommandError, ClientError."""
        for pod in self._list_running(self._index):
            metadata = pod["metadata"]
            return ChosenPod(metadata["name"], metadata["uid"], pod["spec"]["nodeName"])
        raise CommandError(f"--lose-node: {self._name} has no running pod {self._index}", ExitCode.BAD_INPUT)

    def sightings(self) -> Iterator[Sighting]:
        """Yield what is seen, without end. Raises: RunEnded, ClientError."""
        while True:
            status = parse_status(get_job(self._api, self._name))
            uids = frozenset(pod["metadata"]["uid"] for pod in list_pods(self._api, self._name, index=self._index))
            yield Sighting(time.monotonic(), facts=read_facts(status, uids))
            if status.phase in ENDED_PHASES:
                raise RunEnded(str(status.phase))
            for pod in map(log_pod, self._list_running(0)):
                self._follow(pod)
            until = time.monotonic() + _POLL_SECONDS
            with suppress(queue.Empty):
                while (left := until - time.monotonic()) > 0:
                    yield self._samples.get(timeout=left)

    def _list_running(self, index: int) -> list[Object]:
        pods = [
            pod for pod in list_pods(self._api, self._name, index=index) if "deletionTimestamp" not in pod["metadata"]
        ]
        pods = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
        return sorted(pods, key=lambda pod: log_pod(pod).attempt, reverse=True)

    def _follow(self, pod: LogPod) -> None:
        """Read the samples of a pod in a thread of its own: a connection to a lost node hangs."""
        if pod.name not in self._followed:
            self._followed.add(pod.name)
            threading.Thread(target=self._read, args=(pod,), daemon=True).start()

    def _read(self, pod: LogPod) -> None:
        with suppress(ClientError):
            command = build_probe_command("watch", str(self._find_port()), str(_PROBE_SECONDS))
            for line in execute_in_pod(self._api, pod, command):
                moment = time.monotonic()
                self._samples.put(Sighting(moment, sample=parse_sample(json.loads(line), moment, pod.attempt)))
        self._followed.discard(pod.name)

    def _find_port(self) -> int:
        return find_metrics_port(get_job(self._api, self._name))


def read_facts(status: Status, uids: frozenset[str]) -> JobFacts:
    """Return what a status states about a lost node. ``uids``: of the pods of the chosen index."""
    progressing = status.condition(c.PROGRESSING)
    reason = progressing.reason if progressing is not None else ""
    return JobFacts(
        silent=reason if reason in (other_reasons.NODE_SILENT, other_reasons.NODE_NOT_READY) else "",
        avoided=status.failed_nodes,
        attempt=status.attempt,
        restarts=status.restarts.all,
        counted=status.restarts.used,
        uids=uids,
    )
