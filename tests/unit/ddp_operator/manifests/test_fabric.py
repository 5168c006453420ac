"""The pods' additions for the network between nodes, and the files that they come from."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, get_args, get_type_hints

import pytest

from ddp_operator.api.constants import ENV_LAUNCHER_CONFIG
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.spec import Network
from ddp_operator.manifests.children import build_children
from ddp_operator.manifests.fabric import load_fabric
from ddp_pod.network.nccl_log import read_network
from tests.support.builders import job, template, trainer

PROFILES = [name for name in get_args(get_type_hints(Network)["profile"]) if name != "auto"]
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
IB_DEVICE = "rdma/rdma_shared_device_a"


def pod_of(profile: str = "ib", attempt: int = 1, *, pod: Any = None, nodes: int = 2, **spec: Any) -> Any:
    """Return the template of a job's pods."""
    network = spec.pop("network", {"profile": profile})
    pod = pod or template(trainer(resources=GPUS))
    made = build_children(job(nodes=nodes, network=network, template=pod, **spec), attempt=attempt, nodes=nodes)
    return next(child for child in made if child["kind"] == "Job")["spec"]["template"]


def trainer_of(*arguments: Any, **spec: Any) -> Any:
    return pod_of(*arguments, **spec)["spec"]["containers"][0]


def variables(container: Any) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def preflight(**spec: Any) -> Any:
    return json.loads(variables(trainer_of(**spec))[ENV_LAUNCHER_CONFIG])["preflight"]


def refusal(**spec: Any) -> str:
    with pytest.raises(InvalidManifest) as caught:
        pod_of(**spec)
    return str(caught.value)


class TestData:
    def test_every_profile_has_one_file(self) -> None:
        files = (resources.files("ddp_operator.manifests") / "fabrics").iterdir()
        assert sorted(file.name for file in files) == sorted(f"{name}.yaml" for name in PROFILES)

    @pytest.mark.parametrize(("profile", "log"), LOGS)
    def test_log_of_network_counts_as_its_profile_alone(self, profile: str, log: str) -> None:
        """The lines are published ones: from issues of NCCL and aws-ofi-nccl, and from Google's and NVIDIA's guides."""
        transport = read_network(log).transport
        assert [name for name in PROFILES if transport in load_fabric(name).transports] == [profile]

    @pytest.mark.parametrize("profile", PROFILES)
    def test_template_uses_only_fields_of_jobs(self, profile: str) -> None:
        """It passes the operator's own checks as the template of a job without a profile."""
        partial = load_fabric(profile).template
        [container] = partial["spec"]["containers"]
        assert container["name"] == "trainer"
        whole = {**container, "image": "i", "command": ["python", "t.py"]}
        whole["resources"] = {"limits": {"memory": "1Gi", **(container.get("resources") or {}).get("limits", {})}}
        pod = {**partial["spec"], "containers": [whole]}
        assert trainer_of(network=None, pod={"metadata": partial.get("metadata"), "spec": pod})["name"] == "trainer"

    @pytest.mark.parametrize("profile", PROFILES)
    def test_no_pod_shares_its_nodes_network_or_is_privileged(self, profile: str) -> None:
        """check_fabric does not check them."""
        pod = load_fabric(profile).template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & {*pod}
        contexts = [item.get("securityContext", {}) for item in [*pod["containers"], *pod.get("initContainers", ())]]
        assert not [context for context in contexts if "privileged" in context]


class TestTemplate:
    def test_job_gets_fields_of_profile(self) -> None:
        container = trainer_of("ib")
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "512Gi", IB_DEVICE: 1}
        assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
        assert variables(trainer_of("socket"))["NCCL_NET"] == "Socket"
        daemon = pod_of("tcpxo")["spec"]["initContainers"][0]
        assert (daemon["name"], daemon["restartPolicy"]) == ("tcpxo-daemon", "Always")

    def test_job_overrides_profile(self) -> None:
        own = template(
            trainer(
                resources=GPUS,
                env=[{"name": "NCCL_MIN_NCHANNELS", "value": "8"}],
                securityContext={"capabilities": {"add": ["SYS_NICE"]}},
            ),
            metadata={"annotations": {"networking.gke.io/interfaces": "[]"}},
        )
        pod = pod_of("tcpxo", pod=own)
        assert variables(pod["spec"]["containers"][0])["NCCL_MIN_NCHANNELS"] == "8"
        assert variables(pod["spec"]["containers"][0])["NCCL_FASTRAK_USE_LLCM"] == "1"
        assert pod["metadata"]["annotations"]["networking.gke.io/interfaces"] == "[]"
        assert pod["metadata"]["annotations"]["networking.gke.io/default-interface"] == "eth0"
        assert trainer_of("ib", pod=own)["securityContext"]["capabilities"] == {"add": ["SYS_NICE"]}

    @pytest.mark.parametrize(
        "asked",
        [
            {"limits": {"rdma/ib": "1"}},
            {"limits": {IB_DEVICE: "4"}},
            {"limits": {"nvidia.com/hostdev": "8"}},
            {"limits": {IB_DEVICE: "4"}, "requests": {IB_DEVICE: "4"}},
        ],
    )
    def test_device_of_same_kind_replaces_default(self, asked: Any) -> None:
        limits = trainer_of("ib", pod=template(trainer(resources=asked)))["resources"]["limits"]
        assert limits == asked["limits"]

    def test_huge_pages_need_cpu_or_memory_beside_them(self) -> None:
        words = refusal(profile="efa", pod=template(trainer(resources={"limits": {"nvidia.com/gpu": "8"}})))
        assert (
            "containers[0].resources.limits[hugepages-2Mi]: Kubernetes allows huge pages only together with cpu"
            in words
        )

    def test_single_pod_job_needs_no_network_unless_elastic(self) -> None:
        assert pod_of("tcpxo", nodes=1) == pod_of(network=None, nodes=1)
        elastic = pod_of("ib", nodes=1, elastic={"minNodes": 1, "maxNodes": 4})
        assert IB_DEVICE in elastic["spec"]["containers"][0]["resources"]["limits"]

    def test_fetching_pod_gets_no_network_fields(self) -> None:
        inputs = [{"url": "https://host/file", "mountPath": "/data", "claimName": "data"}]
        fetch = pod_of("tcpxo", attempt=0, inputs=inputs)
        assert "networking.gke.io/interfaces" not in fetch["metadata"]["annotations"]
        assert not [volume for volume in fetch["spec"]["volumes"] if "hostPath" in volume]
        assert "tcpxo-daemon" not in json.dumps(fetch["spec"])


class TestFabricRefusals:
    @pytest.mark.parametrize(
        ("profile", "asked"),
        [
            ("ib", "the capability IPC_LOCK"),
            ("tcpxo", "the capability NET_ADMIN, volumes of the node (hostPath)"),
        ],
    )
    def test_restricted_pod_security_refuses_fabric(self, profile: str, asked: str) -> None:
        words = refusal(profile=profile, securityProfile="Restricted")
        assert f'spec.network.profile: Invalid value: "{profile}": needs {asked}, which spec.securityProfile' in words

    def test_template_request_belongs_to_job(self) -> None:
        own = trainer(resources=GPUS, securityContext={"capabilities": {"add": ["IPC_LOCK"]}})
        assert pod_of("ib", pod=template(own), securityProfile="Restricted")
        assert pod_of("socket", securityProfile="Restricted")

    def test_required_network_needs_gpus(self) -> None:
        needed = {"profile": "auto", "require": True}
        assert refusal(network=needed, pod=template(trainer())).startswith(
            "spec.network.require: Invalid value: true: needs GPUs"
        )
        assert pod_of(network=needed | {"profile": "socket"}, pod=template(trainer()))
        assert pod_of(network=needed, pod=template(trainer()), nodes=1), "one pod has no network to require"
        claimed = template(trainer(resources={"claims": [{"name": "gpus"}]}), resourceClaims=[{"name": "gpus"}])
        assert pod_of(network=needed, pod=claimed, procPerNode=8)


class TestPreflight:
    def test_required_network_is_checked_with_any_checks(self) -> None:
        plan = preflight(network={"profile": "ib", "require": True})
        assert plan["checks"] == ["dns", "tcp", "allreduce", "pairs"]
        assert (plan["require"], plan["fail"]) == (True, False)
        assert plan["transports"] == ["IB", "NVLink"]
        assert plan["minPairBytesPerSecond"] == 2e9

    @pytest.mark.parametrize(("asked", "checks"), [(30000, True), (0, False)])
    def test_floor_of_job_overrides_profile(self, asked: int, checks: bool) -> None:
        plan = preflight(network={"profile": "ib", "require": True, "minPairMegabytesPerSecond": asked})
        assert plan.get("minPairBytesPerSecond", 0) == asked * 10**6
        assert ("pairs" in plan["checks"]) == checks
