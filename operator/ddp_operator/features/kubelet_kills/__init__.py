"""Why the kubelet killed a training container: its probe or hook failed, as the Events about the pod report."""

import asyncio
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ddp_operator.api.cluster import Object
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.faults import contain, name_object
from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.decide.failures import Termination
from ddp_operator.decide.hooks import Feature, PodHook
from ddp_operator.decide.state import KnownEnds
from ddp_operator.reading.events import PROBE_REMEDY, ContainerKill, find_kill, list_killed_pods
from ddp_operator.reading.terminations import sanitize_text
from ddp_pod.contract.failure_table import KILLED

if TYPE_CHECKING:  # of a pass, which the commands do not have
    from ddp_operator.reconcile.acting import PodPages

_MAX_TEXT: Final = 2048
_SECONDS_FOR_EVENTS: Final = 8.0
"""Of one pod: the hook has 30 s for all, after which it would lose what it knows of the others."""


@dataclass(frozen=True, slots=True)
class KillReading(KnownEnds):
    """What was read of killed containers. ``kills``: by the UID of the pod; None: no Event reports why."""

    kills: Mapping[str, ContainerKill | None] = field(default_factory=dict)


async def observe(pages: "PodPages", former: KillReading | None) -> KillReading | None:
    """Return why the kubelet killed training containers; the Events of a pod are read once."""
    known = {} if former is None else former.kills
    kills: dict[str, ContainerKill | None] = {}
    ends: dict[str, Termination] = {}
    for pod in list_killed_pods(pages.children.pods_of(pages.job.status.attempt)):
        if pod.uid in known:
            kills[pod.uid] = known[pod.uid]
        else:
            with suppress(Refused, ClusterError), contain("cause of a kill", name_object(pod.raw)):
                events = await _read_events(pages, pod.raw)
                kills[pod.uid] = find_kill(events, find_trainer(pod.raw).get("name"))
        kill = kills.get(pod.uid)
        if kill is not None and pod.termination is not None:
            ends[pod.uid] = explain_end(pod.termination, kill)
    return KillReading(ends, kills) if kills else None


async def _read_events(pages: "PodPages", pod: Object) -> tuple[Object, ...]:
    """Return the Events of a pod; another pass reads those that take long. Raises: Refused, ClusterError."""
    try:
        async with asyncio.timeout(_SECONDS_FOR_EVENTS):
            return await pages.cluster.events_of(pod)
    except TimeoutError:
        raise ClusterError(f"its Events take more than {_SECONDS_FOR_EVENTS:g} s") from None


def explain_end(end: Termination, kill: ContainerKill) -> Termination:
    """Return the end of a container that the kubelet killed. The signature ends a job that the probe always fails."""
    because = f": {kill.message}" if kill.message else ""
    message = f"the kubelet killed container {kill.container}, because its {kill.field} failed{because}"
    return dataclasses.replace(
        end,
        category=KILLED.name,
        secondary=False,
        ended_by_probe=True,
        message=sanitize_text(message, _MAX_TEXT),
        remedy=PROBE_REMEDY.format(field=kill.field, container=kill.container),
        signature=f"failed {kill.field} of container {kill.container}",
    )


FEATURE: Final = Feature(
    "kubelet-kills",
    maturity="stable",
    page="troubleshooting.md",
    pods=PodHook(KillReading, observe, each_pass=True),
)
