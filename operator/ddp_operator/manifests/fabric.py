"""Network profiles: additions to a job's pod template for the network between its nodes, one data file per profile.

The files name the source of each value. The job's own template takes precedence, as in a merge with a profile.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from ddp_operator.api.constants import PREFLIGHT_CHECKS
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import FieldError
from ddp_operator.api.kubeobjects import count_pod_gpus, find_trainer
from ddp_operator.api.merge import merge
from ddp_operator.api.profile import unify_trainer_names
from ddp_operator.api.spec import Network, Spec
from ddp_pod.contract.plan import PreflightConfig

_RESTRICTED_MAY_ADD: Final = "NET_BIND_SERVICE"


class FabricSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document of a provider, and the values that were taken from it."""

    url: str
    taken: str


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The data of a network profile. ``transports``: the launcher's names for its transports in NCCL's log.

    ``alternatives``: a resource of the template -> patterns of resources that replace it if the job requests one.
    """

    source: tuple[FabricSource, ...]
    transports: tuple[str, ...]
    min_pair_megabytes_per_second: int
    template: dict[str, Any]
    alternatives: dict[str, tuple[str, ...]] = {}


NONE: Final = Fabric(source=(), transports=(), min_pair_megabytes_per_second=0, template={})


@cache
def load_fabric(profile: str) -> Fabric:
    """Return the data of a profile, which is empty for ``auto``."""
    if profile == "auto":
        return NONE
    file = resources.files("ddp_operator.manifests") / "fabrics" / f"{profile}.yaml"
    [content] = load_documents(file.read_text(encoding="utf-8"))
    return msgspec.convert(content, Fabric)


def _find_network(spec: Spec) -> Network:
    """Return the network settings of a job. They do not apply to a job with a single pod that is not elastic."""
    has_single_pod = spec.nodes == 1 and not spec.elastic
    if has_single_pod or spec.network is None:
        return Network()
    return spec.network


def plan_preflight(spec: Spec) -> PreflightConfig | None:
    """Return the checks before training and their thresholds, or None if there are no checks."""
    preflight = spec.preflight
    network = _find_network(spec)
    fabric = load_fabric(network.profile)
    min_pair_megabytes = network.min_pair_megabytes_per_second
    if min_pair_megabytes is None:
        min_pair_megabytes = fabric.min_pair_megabytes_per_second

    selected = set[str](preflight.checks)
    if network.require:
        selected.add("allreduce")
        if min_pair_megabytes:
            selected.add("pairs")
    checks = tuple(check for check in PREFLIGHT_CHECKS if check in selected)
    if not checks or preflight.mode == "Off":
        return None
    return PreflightConfig(
        fail=preflight.mode == "Fail",
        checks=checks,
        min_bytes_per_second=preflight.min_megabytes_per_second * 10**6,
        min_pair_bytes_per_second=min_pair_megabytes * 1e6,
        require=network.require,
        transports=fabric.transports,
    )


def merge_fabric(spec: Spec) -> dict[str, Any]:
    """Return metadata and spec of the training pods: the job's template merged into the network profile's.

    The shape of the template must have been checked.
    """
    own = {"metadata": spec.template.metadata or {}, "spec": spec.template.spec}
    fabric = load_fabric(_find_network(spec).profile)
    if not fabric.template:
        return own

    base, top = unify_trainer_names({"template": fabric.template}, {"template": own})
    trainer = find_trainer(base["template"])
    replaced = _list_replaced_limits(trainer, find_trainer(own), fabric)
    if replaced:
        removal = {"name": trainer["name"], "resources": {"limits": dict.fromkeys(replaced)}}
        base = merge(base, {"template": {"spec": {"containers": [removal]}}})
    merged: dict[str, Any] = merge(base, top)["template"]
    return merged


def _list_replaced_limits(base: Mapping[str, Any], own: Mapping[str, Any], fabric: Fabric) -> list[str]:
    """Return the limits of the profile's trainer for which the job's trainer has the resource or an alternative.

    The API server refuses a device whose limit differs from its request.
    """
    own_resources = own.get("resources") or {}
    requested = {*(own_resources.get("limits") or {}), *(own_resources.get("requests") or {})}
    replaced = []
    for name in (base.get("resources") or {}).get("limits") or {}:
        patterns = (name, *fabric.alternatives.get(name, ()))
        if any(fnmatchcase(resource, pattern) for resource in requested for pattern in patterns):
            replaced.append(name)
    return replaced


def check_fabric(spec: Spec, pod: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that the pods can use the requested network. ``pod``: the merged spec of the training pods."""
    network = _find_network(spec)
    if network.require and network.profile != "socket" and not (count_pod_gpus(pod) or pod.get("resourceClaims")):
        message = (
            "needs GPUs, because gloo on CPUs uses sockets; add nvidia.com/gpu to the trainer's limits, or remove this "
            "field"
        )
        yield FieldError("spec.network.require", message, value=True)
    added = sorted({*_list_privileges(pod)} - {*_list_privileges(spec.template.spec)})
    if added and spec.security_profile == "Restricted":
        message = (
            f"needs {', '.join(added)}, which spec.securityProfile: Restricted does not allow; set securityProfile to "
            "Default, or this field to auto"
        )
        yield FieldError("spec.network.profile", message, network.profile)


def _list_privileges(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yield the privileges of network profiles in a pod that the restricted Pod Security Standard refuses."""
    for volume in pod.get("volumes") or ():
        if volume.get("hostPath"):
            yield "volumes of the node (hostPath)"
    for container in [*pod["containers"], *(pod.get("initContainers") or ())]:
        for name in ((container.get("securityContext") or {}).get("capabilities") or {}).get("add") or ():
            if name != _RESTRICTED_MAY_ADD:
                yield f"the capability {name}"
