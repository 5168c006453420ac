"""The NetworkPolicy of a job: its pods talk to each other and to DNS, and the cluster may read their metrics."""

from __future__ import annotations

from typing import Any, Final

from ddp_operator import names
from ddp_operator.api.job import DDPTrainingJob

_DNS: Final = [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]


def build_network_policy_spec(job: DDPTrainingJob) -> dict[str, Any]:
    """Return ``NetworkPolicy.spec``, the same for all attempts."""

    def pods() -> dict[str, Any]:
        return {"matchLabels": names.child_labels(job.name)}

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
            # The operator, and whichever Prometheus the cluster has.
            {
                "from": [{"namespaceSelector": {}}],
                "ports": [{"port": job.spec.metrics.port, "protocol": "TCP"}],
            },
        ],
        "egress": egress,
    }
