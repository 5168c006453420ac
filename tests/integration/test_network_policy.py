"""The NetworkPolicies of jobs and of the operator, enforced by the kernel between pods that are network namespaces.

No network plug-in is needed: the rendered policies are translated into the kernel's own filter rules, and real
connections are tried. It remains open whether a certain cluster's plug-in enforces policies at all.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli.client.validation import check_manifest
from tests.support import pod_network
from tests.support.builders import job_manifest
from tests.support.chart import render, the
from tests.support.pod_network import NetworkPod, build_ruleset

RENDEZVOUS = 29400
METRICS = 9400
GLOO = 40123
API = 443
STORAGE = 2049
TCP = (RENDEZVOUS, METRICS, GLOO, API, STORAGE, 8080, 53)
UDP = (53,)
NAMESPACES = {
    name: {"kubernetes.io/metadata.name": name}
    for name in ("team", "other", "monitoring", "ddp-operator", "kube-system")
}
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--fork", "--kill-child")

Probe = tuple[str, str, str, int]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    """Skip, with the reason, if this machine permits no network namespaces."""
    lacking = [name for name in ("unshare", "ip", "nft") if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"not found: {', '.join(lacking)}")
    request = {"addresses": ["10.1.0.1"], "ports": {"tcp": [], "udp": []}, "ruleset": "table inet a {}", "probes": []}
    tried = run_network(request)
    if re.search(r"not permitted|[Pp]ermission denied|[Rr]ead-only|No such device|not supported", tried.stderr):
        pytest.skip(f"no network namespaces here: {tried.stderr.strip().splitlines()[-1]}")
    assert tried.returncode == 0, tried.stderr


def run_network(request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the network of a request in separate namespaces."""
    command = [*UNSHARE, sys.executable, str(Path(pod_network.__file__))]
    return subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=120)


@cache
def labels_of_training(name: str) -> dict[str, str]:
    (job,) = (child for child in children(job_manifest(name)) if child["kind"] == "Job")
    return dict(job["spec"]["template"]["metadata"]["labels"])


def children(manifest: dict[str, Any]) -> tuple[Any, ...]:
    manifest["metadata"]["namespace"] = "team"
    return check_manifest(yaml.safe_dump(manifest)).children


def pods() -> dict[str, NetworkPod]:
    """Everyone who may connect to a training pod."""
    operator = the(render({"networkPolicy": {"enabled": True}}, namespace="ddp-operator"), "Deployment")
    train = labels_of_training("train")
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    made = [
        NetworkPod("train-0", "10.1.0.1", "team", train),
        NetworkPod("train-1", "10.1.0.2", "team", train),
        NetworkPod("other-job", "10.1.0.3", "team", labels_of_training("other")),
        NetworkPod("neighbour", "10.1.0.4", "team", {"app": "shell"}),
        # Labels have no meaning outside their namespace.
        NetworkPod("impostor", "10.1.0.5", "other", train),
        NetworkPod("prometheus", "10.1.0.6", "monitoring", prometheus),
        NetworkPod("grafana", "10.1.0.7", "monitoring", {"app.kubernetes.io/name": "grafana"}),
        NetworkPod(
            "operator", "10.1.0.8", "ddp-operator", operator["spec"]["template"]["metadata"]["labels"], {"http": 8080}
        ),
        NetworkPod("dns", "10.1.0.9", "kube-system", {"k8s-app": "kube-dns"}),
        NetworkPod("apiserver", "172.16.0.1"),
        NetworkPod("storage", "192.168.7.7"),
    ]
    return {pod.name: pod for pod in made}


def policies(**network_policy: Any) -> list[dict[str, Any]]:
    """The policy of the job `train`, and the chart's for the operator."""
    manifest = job_manifest("train", networkPolicy={"enabled": True, **network_policy})
    (job,) = (child for child in children(manifest) if child["kind"] == "NetworkPolicy")
    operator = the(render({"networkPolicy": {"enabled": True}}, namespace="ddp-operator"), "NetworkPolicy")
    return [dict(job), operator]


def probe(ruleset: str, probes: list[Probe]) -> dict[Probe, bool]:
    """Try every probe (source, destination, protocol, port) in a network with these rules."""
    known = pods()
    order = list(known)
    request = {
        "addresses": [pod.address for pod in known.values()],
        "ports": {"tcp": TCP, "udp": UDP},
        "ruleset": ruleset,
        "probes": [(order.index(source), known[to].address, kind, port) for source, to, kind, port in probes],
    }
    done = run_network(request)
    assert done.returncode == 0, done.stderr
    return dict(zip(probes, json.loads(done.stdout), strict=True))


def tcp(source: str, *to: str, ports: tuple[int, ...]) -> list[Probe]:
    return [(source, destination, "tcp", port) for destination in to for port in ports]


OPEN = [
    # Ranks connect to each other on any port that gloo or NCCL choose.
    *tcp("train-0", "train-1", ports=(RENDEZVOUS, METRICS, GLOO)),
    *tcp("train-1", "train-0", ports=(RENDEZVOUS, METRICS, GLOO)),
    ("train-0", "dns", "udp", 53),
    *tcp("train-0", "dns", ports=(53,)),
    *tcp("operator", "train-0", ports=(METRICS,)),
    *tcp("operator", "apiserver", ports=(API,)),
    ("operator", "dns", "udp", 53),
    *tcp("prometheus", "operator", ports=(8080,)),
]
CLOSED = [
    # The rendezvous has no password: no other pod may reach it.
    *(
        result
        for source in ("other-job", "neighbour", "impostor", "prometheus", "grafana", "operator", "apiserver")
        for result in tcp(source, "train-0", ports=(RENDEZVOUS, GLOO))
    ),
    *(
        result
        for source in ("other-job", "neighbour", "impostor", "grafana")
        for result in tcp(source, "train-0", ports=(METRICS,))
    ),
    # A training pod reaches nothing else.
    *tcp("train-0", "other-job", "neighbour", "impostor", "prometheus", "operator", ports=(METRICS, GLOO, 8080)),
    *tcp("train-0", "apiserver", ports=(API,)),
    *tcp("train-0", "storage", ports=(STORAGE,)),
    # Neither does the operator's pod.
    *tcp("operator", "neighbour", "storage", "prometheus", ports=(GLOO, STORAGE, 8080)),
    *tcp("neighbour", "operator", ports=(GLOO, METRICS)),
]
BY_PROMETHEUS = tcp("prometheus", "train-0", ports=(METRICS,))
TO_STORAGE = tcp("train-0", "storage", ports=(STORAGE,))


def test_without_policy_all_pods_connect() -> None:
    """Without this, the refusals below would prove nothing."""
    asked = [*OPEN, *CLOSED, *BY_PROMETHEUS, *TO_STORAGE]
    assert [result for result, through in probe("", asked).items() if not through] == []


def test_pods_of_job_connect_only_to_required_peers() -> None:
    ruleset = build_ruleset(policies(), list(pods().values()), NAMESPACES)
    through = probe(ruleset, [*OPEN, *CLOSED, *BY_PROMETHEUS])
    assert [result for result in (*OPEN, *BY_PROMETHEUS) if not through[result]] == []
    assert [result for result in CLOSED if through[result]] == []


def test_readers_of_metrics_and_networks_are_those_that_are_named() -> None:
    grafana = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "grafana"}}, "namespaceSelector": {}}
    named = policies(metricsFrom=[grafana], egressCidrs=["192.168.7.0/24"])
    reads = tcp("grafana", "train-0", ports=(METRICS,))
    open_now = [*OPEN, *TO_STORAGE, *reads]
    closed_now = [*BY_PROMETHEUS, *(result for result in CLOSED if result not in open_now)]
    through = probe(build_ruleset(named, list(pods().values()), NAMESPACES), [*open_now, *closed_now])
    assert [result for result in open_now if not through[result]] == []
    assert [result for result in closed_now if through[result]] == []


def test_only_own_pods_reach_rendezvous() -> None:
    everybody = policies(metricsFrom=[{"namespaceSelector": {}}, {"ipBlock": {"cidr": "0.0.0.0/0"}}])
    reads = tcp("grafana", "train-0", ports=(METRICS,))
    strangers = [name for name in pods() if name not in ("train-0", "train-1")]
    closed = [result for source in strangers for result in tcp(source, "train-0", ports=(RENDEZVOUS, GLOO))]
    through = probe(build_ruleset(everybody, list(pods().values()), NAMESPACES), [*reads, *OPEN, *closed])
    assert [result for result in (*reads, *OPEN) if not through[result]] == []
    assert [result for result in closed if through[result]] == []
