"""What the pods of a job get for the network between its nodes: one file of data a profile, below the job's template.

The files say where each value is from. A job's own template wins over them, by the merge that profiles have.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec
import yaml

from ddp_operator.api.errors import FieldError
from ddp_operator.api.merge import merge
from ddp_operator.api.profile import unify_trainer_names
from ddp_operator.api.spec import Network, Spec
from ddp_operator.constants import PREFLIGHT_CHECKS
from ddp_operator.kubeobjects import count_pod_gpus, find_trainer
from ddp_operator.launcher.pod import PreflightConfig

_RESTRICTED_MAY_ADD: Final = "NET_BIND_SERVICE"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document of a provider's, and what was taken from it."""

    url: str
    taken: str


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a profile asks for. ``transports``: names that the launcher has for it, by NCCL's log.

    ``alternatives``: patterns of resources by the resource that is left out where the job asks for one of them.
    """

    source: tuple[Source, ...]
    transports: tuple[str, ...]
    min_pair_megabytes_per_second: int
    template: dict[str, Any]
    alternatives: dict[str, tuple[str, ...]] = {}


NONE: Final = Fabric(source=(), transports=(), min_pair_megabytes_per_second=0, template={})


@cache
def load_fabric(profile: str) -> Fabric:
    """Return the data of a profile; of ``auto``, which has none, nothing."""
    if profile == "auto":
        return NONE
    file = resources.files("ddp_operator.manifests") / "fabrics" / f"{profile}.yaml"
    return msgspec.convert(yaml.safe_load(file.read_text(encoding="utf-8")), Fabric)


def _between_nodes(spec: Spec) -> Network:
    """Return what a job asks for. One that is a single pod, and stays so, has no network between nodes."""
    return (spec.network if spec.nodes > 1 or spec.elastic else None) or Network()


def plan_preflight(spec: Spec) -> PreflightConfig | None:
    """Return which checks the pods make before training, and what they must find; None: they make none."""
    flight, network = spec.preflight, _between_nodes(spec)
    fabric, floor = load_fabric(network.profile), network.min_pair_megabytes_per_second
    if floor is None:
        floor = fabric.min_pair_megabytes_per_second
    wanted = {*flight.checks, *(("allreduce", *(("pairs",) if floor else ())) if network.require else ())}
    checks = tuple(check for check in PREFLIGHT_CHECKS if check in wanted)
    if not checks or flight.mode == "Off":
        return None
    return PreflightConfig(
        fail=flight.mode == "Fail",
        checks=checks,
        min_bytes_per_second=flight.min_megabytes_per_second * 10**6,
        min_pair_bytes_per_second=floor * 1e6,
        require=network.require,
        transports=fabric.transports,
    )


def merge_fabric(spec: Spec) -> dict[str, Any]:
    """Return metadata and spec of the training pods: what the profile gives them, and over it the job's template.

    The template's shape has been checked.
    """
    own = {"metadata": spec.template.metadata or {}, "spec": spec.template.spec}
    fabric = load_fabric(_between_nodes(spec).profile)
    if not fabric.template:
        return own
    base, top = unify_trainer_names({"template": fabric.template}, {"template": own})
    trainer, resources = find_trainer(base["template"]), find_trainer(own).get("resources") or {}
    asked = {*(resources.get("limits") or {}), *(resources.get("requests") or {})}
    # A limit of ours beside a request of theirs would be refused: of a device both must be the same.
    taken = {
        name: None
        for name in (trainer.get("resources") or {}).get("limits") or {}
        if any(fnmatchcase(one, pattern) for one in asked for pattern in (name, *fabric.alternatives.get(name, ())))
    }
    if taken:
        rest = {"name": trainer["name"], "resources": {"limits": taken}}
        base = merge(base, {"template": {"spec": {"containers": [rest]}}})
    merged: dict[str, Any] = merge(base, top)["template"]
    return merged


def check_fabric(spec: Spec, pod: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that a job can have the network that it asks for. ``pod``: its training pods' spec, merged."""
    network = _between_nodes(spec)
    if network.require and network.profile != "socket" and not (count_pod_gpus(pod) or pod.get("resourceClaims")):
        words = "needs GPUs: between CPUs data goes by gloo, over sockets; add nvidia.com/gpu to the trainer's limits"
        yield FieldError("spec.network.require", f"{words}, or remove this", value=True)
    asked = sorted({*_list_rights(pod)} - {*_list_rights(spec.template.spec)})
    if asked and spec.security_profile == "Restricted":
        words = f"needs {', '.join(asked)}, and spec.securityProfile: Restricted allows none of it; set that to Default"
        yield FieldError("spec.network.profile", f"{words}, or this to auto", network.profile)


def _list_rights(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the restricted Pod Security Standard refuses of a pod, as far as fabrics ask for such things."""
    for volume in pod.get("volumes") or ():
        if volume.get("hostPath"):
            yield "volumes of the node (hostPath)"
    for container in [*pod["containers"], *(pod.get("initContainers") or ())]:
        for name in ((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or ():
            if name != _RESTRICTED_MAY_ADD:
                yield f"the capability {name}"
