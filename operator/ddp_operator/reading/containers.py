"""What the containers of a pod do that are not the training container. Pure."""

from typing import NamedTuple

from ddp_operator.api.kubeobjects import find_trainer
from ddp_operator.decide.views import PodView, list_sidecars


class RunningInitContainer(NamedTuple):
    """An init container that runs before the training container. ``is_sidecar``: its startupProbe has not succeeded."""

    name: str
    since: str
    is_sidecar: bool


def find_init_container(pod: PodView) -> RunningInitContainer | None:
    """Return the init container that runs now; None: none does."""
    sidecars = list_sidecars(pod.raw)
    for container in (pod.raw.get("status") or {}).get("initContainerStatuses") or ():
        running = (container.get("state") or {}).get("running")
        name = str(container.get("name"))
        if pod.phase == "Pending" and running is not None and not (name in sidecars and container.get("started")):
            return RunningInitContainer(name, str(running.get("startedAt") or ""), name in sidecars)
    return None


def list_injected_containers(pod: PodView) -> tuple[str, ...]:
    """Return those that run beside the training container, which a template cannot have: a webhook added them."""
    statuses = (pod.raw.get("status") or {}).get("containerStatuses") or ()
    running = (str(item["name"]) for item in statuses if not (item.get("state") or {}).get("terminated"))
    return tuple(name for name in running if name != find_trainer(pod.raw).get("name"))


def list_remaining_containers(pod: PodView) -> tuple[str, ...]:
    """Return the containers and native sidecars that have not ended."""
    status = pod.raw.get("status") or {}
    sidecars = list_sidecars(pod.raw)
    init_containers = [item for item in status.get("initContainerStatuses") or () if item.get("name") in sidecars]
    containers = [*(status.get("containerStatuses") or ()), *init_containers]
    return tuple(str(item["name"]) for item in containers if not (item.get("state") or {}).get("terminated"))
