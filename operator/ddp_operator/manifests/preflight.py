"""The checks before training, and the network that a job requires between its pods. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from ddp_operator.api.constants import PREFLIGHT_CHECKS
from ddp_operator.api.errors import FieldError
from ddp_operator.api.kubeobjects import count_pod_gpus
from ddp_operator.api.rules import NETWORK_PROFILE_REMOVED
from ddp_operator.api.spec import Network, Spec
from ddp_pod.contract.plan import PreflightConfig


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
    min_pair_megabytes = network.min_pair_megabytes_per_second or 0

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
        transports=network.transports,
    )


def check_network(spec: Spec, pod: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check that the pods can use the required network. ``pod``: the spec of the training pods."""
    if spec.network is not None and spec.network.profile not in (None, "auto"):
        yield FieldError("spec.network.profile", NETWORK_PROFILE_REMOVED, spec.network.profile)
    network = _find_network(spec)
    if (
        network.require
        and "Socket" not in network.transports
        and not (count_pod_gpus(pod) or pod.get("resourceClaims"))
    ):
        message = (
            "needs GPUs, because gloo on CPUs uses sockets; add nvidia.com/gpu to the trainer's limits, or remove this "
            "field"
        )
        yield FieldError("spec.network.require", message, value=True)
