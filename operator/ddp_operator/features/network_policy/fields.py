"""``spec.networkPolicy``, its rules and checks, and the object that all attempts share."""

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, field

from ddp_operator.api import child_names, constants
from ddp_operator.api.errors import FieldError
from ddp_operator.api.job import DDPTrainingJob
from ddp_operator.api.parts import ChildBody, OwnChild
from ddp_operator.api.rule_builders import require
from ddp_operator.api.schema import OwnFields
from ddp_operator.api.spec import SpecFields

# The chart sets it on the operator's pods: a job's NetworkPolicy allows them to read metrics.
LABEL_COMPONENT: Final = f"{constants.GROUP}/component"
COMPONENT_OPERATOR: Final = "operator"
_PEER: Final = frozenset({"namespaceSelector", "podSelector", "ipBlock"})
"""The members of a peer, of which an API server checks the rest in the NetworkPolicy itself."""


class NetworkPolicy(SpecFields, frozen=True, kw_only=True):
    """Limits on the pods' traffic. The network plug-in must enforce NetworkPolicies."""

    enabled: Annotated[
        bool,
        Meta(
            description="True: pods may connect only to pods of the job, DNS and egressCidrs; only pods of the "
            "job, and at the metrics port the operator and metricsFrom, may connect to them."
        ),
    ] = False
    egress_cidrs: Annotated[
        tuple[str, ...], Meta(description="Further address ranges for connections of the pods, such as 10.0.0.0/8.")
    ] = ()
    metrics_from: Annotated[
        tuple[Annotated[Any, Meta(description="A NetworkPolicyPeer of Kubernetes.")], ...] | None,
        Meta(
            description="Clients that may read the pods' metrics besides the operator: NetworkPolicyPeers, as in "
            "`from` of a NetworkPolicy. Unset: pods labelled app.kubernetes.io/name=prometheus in any namespace. "
            "[]: none."
        ),
    ] = None


class NetworkPolicyFields(SpecFields, frozen=True, kw_only=True):
    """The part of this feature in the spec."""

    network_policy: NetworkPolicy = field(default_factory=NetworkPolicy)


def read_policy(job: DDPTrainingJob) -> NetworkPolicy:
    """Return the policy that a job asks for."""
    return FIELDS.read(job.spec).network_policy


def _check(job: DDPTrainingJob, pod: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Check the addresses and peers, and that the pods have a network of their own."""
    policy = read_policy(job)
    if policy.enabled and pod.get("hostNetwork"):
        message = (
            "has no effect on pods with spec.template.spec.hostNetwork; remove that field, or set "
            "networkPolicy.enabled to false"
        )
        yield FieldError("spec.networkPolicy.enabled", message)
    for index, cidr in enumerate(policy.egress_cidrs):
        try:
            ipaddress.ip_network(cidr)
        except ValueError as error:
            message = f"is not a network ({error}); write it such as 10.0.0.0/8, or one host as 10.1.2.3/32"
            yield FieldError(f"spec.networkPolicy.egressCidrs[{index}]", message, cidr)
    if policy.metrics_from is not None and not policy.enabled:
        yield FieldError("spec.networkPolicy.metricsFrom", _NEEDS_POLICY, policy.metrics_from)
    for index, peer in enumerate(policy.metrics_from or ()):
        if not isinstance(peer, Mapping) or not peer or not peer.keys() <= _PEER:
            message = "must have namespaceSelector, podSelector or ipBlock; write it as in a NetworkPolicy's `from`"
            yield FieldError(f"spec.networkPolicy.metricsFrom[{index}]", message, peer)


_NEEDS_POLICY: Final = "has no effect without networkPolicy.enabled: true; set that or remove this field"
_DNS: Final = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
_PROMETHEUS: Final = {"app.kubernetes.io/name": "prometheus"}
"""Label of Prometheus' pods in common charts and in the Prometheus operator."""


def _is_enabled(job: DDPTrainingJob) -> bool:
    return read_policy(job).enabled


def build_policy(job: DDPTrainingJob, nodes: int) -> ChildBody:
    """Return the NetworkPolicy of all attempts: pods connect to each other and to DNS; named clients read metrics."""
    policy = read_policy(job)
    pods = {"matchLabels": child_names.child_labels(job.name)}
    readers = [_labelled(_PROMETHEUS)] if policy.metrics_from is None else policy.metrics_from
    operator = _labelled({LABEL_COMPONENT: COMPONENT_OPERATOR})
    egress: list[dict[str, Any]] = [
        {"to": [{"podSelector": pods}]},
        {"ports": _DNS},  # to any address: the resolver of a node is not a pod
    ]
    if policy.egress_cidrs:
        egress.append({"to": [{"ipBlock": {"cidr": cidr}} for cidr in policy.egress_cidrs]})
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [{"podSelector": pods}]},
            {"from": [operator, *readers], "ports": [{"port": job.spec.metrics.port, "protocol": "TCP"}]},
        ],
        "egress": egress,
    }
    return ChildBody("networking.k8s.io/v1", spec)


def _labelled(labels: dict[str, str]) -> dict[str, Any]:
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": labels}}


FIELDS: Final = OwnFields(
    "network-policy",
    NetworkPolicyFields,
    rules=(
        require(
            "networkPolicy.egressCidrs",
            "size(self.networkPolicy.egressCidrs) == 0"
            " || (has(self.networkPolicy.enabled) && self.networkPolicy.enabled)",
            _NEEDS_POLICY,
        ),
    ),
    fixed_once="started",
    check=_check,
    has_default=True,
    switch="networkPolicy.enabled",
    children=(OwnChild("NetworkPolicy", _is_enabled, build_policy, is_shared=True),),
)
