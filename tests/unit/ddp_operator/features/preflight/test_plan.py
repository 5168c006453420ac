"""The network that a job requires, the checks before training, and the profiles of deploy/profiles for fabrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp_operator.api.constants import ENV_LAUNCHER_CONFIG
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.children import build_children
from ddp_pod.features.preflight.nccl_log import read_network
from tests.support.builders import claiming, job, template, trainer
from tests.support.fabrics import FABRICS, read_fabric

GPUS = {"limits": {"nvidia.com/gpu": "8", "memory": "512Gi"}}
LOGS = [
    ("socket", "NCCL INFO NET/Socket : Using [0]ens3:172.31.10.182<0>\nNCCL INFO Using network Socket\n"),
    (
        "ib",
        "NCCL INFO NET/IB : Using [0]mlx5_2:1/IB/SHARP [RO]; OOB ib0:10.1.0.4<0>\nNCCL INFO Using network IBext_v8\n",
    ),
    ("roce", "NCCL INFO NET/IB : Using [0]mlx5_2:1/RoCE [RO]; OOB eth0:10.244.2.21<0>\nNCCL INFO Using network IB\n"),
    ("roce", "NCCL INFO Using network gIB\n"),
    ("efa", "NCCL INFO NET/OFI Selected Provider is efa (found 1 nics)\nNCCL INFO Using network AWS Libfabric\n"),
    ("efa", "NCCL INFO Channel 07/0 : 1[1] -> 0[0] [send] via NET/AWS Libfabric/1/GDRDMA\n"),
    ("tcpxo", "NCCL INFO Using network FasTrak\n"),
]
REQUIRED = {"transports": ["IB", "NVLink"], "require": True}


def trainer_of(*, nodes: int = 2, **spec: Any) -> Any:
    """Return the training container of a job's pods."""
    spec = {"template": template(trainer(resources=GPUS)), **spec}
    made = build_children(job(nodes=nodes, **spec), attempt=1, nodes=nodes)
    pod = next(child for child in made if child["kind"] == "Job")["spec"]["template"]["spec"]
    return pod["containers"][0]


def preflight_of(**spec: Any) -> Any:
    variables = {item["name"]: item.get("value") for item in trainer_of(**spec)["env"]}
    return json.loads(variables[ENV_LAUNCHER_CONFIG]).get("preflight")


def refusal(**spec: Any) -> str:
    with pytest.raises(InvalidManifest) as caught:
        trainer_of(**spec)
    return str(caught.value)


class TestProfiles:
    @pytest.mark.parametrize(("name", "log"), LOGS)
    def test_log_of_network_counts_as_its_profile_alone(self, name: str, log: str) -> None:
        """The lines are published ones: from issues of NCCL and aws-ofi-nccl, and from Google's and NVIDIA's guides."""
        transport = read_network(log).transport
        assert [fabric for fabric in FABRICS if transport in read_fabric(fabric)["preflight"]["transports"]] == [name]

    @pytest.mark.parametrize("name", FABRICS)
    def test_no_pod_shares_its_nodes_network_or_is_privileged(self, name: str) -> None:
        pod = read_fabric(name)["template"]["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod}
        contexts = [item.get("securityContext", {}) for item in [*pod["containers"], *pod.get("initContainers", ())]]
        assert not [context for context in contexts if "privileged" in context]


class TestRefusals:
    def test_required_network_needs_gpus(self) -> None:
        cpus = template(trainer())
        assert refusal(preflight=REQUIRED, template=cpus).startswith(
            "spec.preflight.require: Invalid value: true: needs GPUs"
        )
        assert trainer_of(preflight={"transports": ["Socket"], "require": True}, template=cpus)
        assert trainer_of(preflight=REQUIRED, template=cpus, nodes=1), "one pod has no network to require"
        assert trainer_of(preflight=REQUIRED, template=claiming(), procPerNode=8)


class TestPreflight:
    def test_required_network_is_checked_with_any_checks(self) -> None:
        plan = preflight_of(preflight=REQUIRED | {"minPairMegabytesPerSecond": 2000})
        assert plan["checks"] == ["dns", "tcp", "allreduce", "pairs"]
        assert (plan["require"], plan["fail"]) == (True, False)
        assert plan["transports"] == ["IB", "NVLink"]
        assert plan["minPairBytesPerSecond"] == 2e9

    @pytest.mark.parametrize("network", [REQUIRED, REQUIRED | {"minPairMegabytesPerSecond": 0}])
    def test_no_pairs_are_measured_without_minimum(self, network: dict[str, Any]) -> None:
        plan = preflight_of(preflight=network)
        assert plan["checks"] == ["dns", "tcp", "allreduce"]
        assert plan.get("minPairBytesPerSecond", 0) == 0

    def test_single_pod_job_requires_no_network_unless_elastic(self) -> None:
        assert "require" not in (preflight_of(preflight=REQUIRED, nodes=1) or {})
        assert preflight_of(preflight=REQUIRED, nodes=1, elastic={"minNodes": 1, "maxNodes": 4})["require"] is True
