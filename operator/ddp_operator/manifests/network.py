"""The NetworkPolicy of a job: its pods talk to each other and to DNS, and who is named may read their metrics."""

import copy
from typing import Any, Final

import msgspec

from ddp_operator import constants, names
from ddp_operator.api.job import DDPTrainingJob

_DNS: Final = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
_PROMETHEUS: Final = {"app.kubernetes.io/name": "prometheus"}
"""What the usual charts and the Prometheus operator call its pods."""


def build_network_policy_spec(job: DDPTrainingJob) -> dict[str, Any]:
    """Return ``NetworkPolicy.spec``, the same for all attempts."""

    def pods() -> dict[str, Any]:
        return {"matchLabels": names.child_labels(job.name)}

    readers = job.spec.network_policy.metrics_from
    others = [_labelled(_PROMETHEUS)] if readers is None else msgspec.to_builtins(readers)
    operator = _labelled({constants.LABEL_COMPONENT: constants.COMPONENT_OPERATOR})
    egress: list[dict[str, Any]] = [
        {"to": [{"podSelector": pods()}]},
        {"ports": [dict(port) for port in _DNS]},  # to anywhere: a node's own resolver is no pod
    ]
    if job.spec.network_policy.egress_cidrs:
        egress.append({"to": [{"ipBlock": {"cidr": cidr}} for cidr in job.spec.network_policy.egress_cidrs]})
    return {
        "podSelector": pods(),
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [{"podSelector": pods()}]},
            {
                "from": [operator, *copy.deepcopy(others)],
                "ports": [{"port": job.spec.metrics.port, "protocol": "TCP"}],
            },
        ],
        "egress": egress,
    }


def _labelled(labels: dict[str, str]) -> dict[str, Any]:
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(labels)}}
