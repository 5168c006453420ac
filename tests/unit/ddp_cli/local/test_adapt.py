"""The changes of `ddp run` to a manifest, and its refusals."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.local.adapt import (
    Changes,
    Unsuitable,
    adapt_resource,
    check_code,
    request_recorder,
    share_cpus,
    use_own_credentials,
)
from ddp_cli.local.machine import find_gpus
from ddp_cli.local.pods import rewrite_hosts
from ddp_operator.api.resources import count_pod_gpus

CPUS = 8
PORT = 40000


def resource(gpus: int = 0, kind: str = "nvidia.com/gpu", **spec: Any) -> dict[str, Any]:
    limits = {"cpu": "16"} | ({kind: str(gpus)} if gpus else {})
    container = {"name": "trainer", "args": ["--a"], "resources": {"limits": limits, "requests": dict(limits)}}
    body = {"nodes": 2, "procPerNode": "auto", "rendezvous": {"backend": "c10d", "port": 29400}, **spec}
    return {"metadata": {"name": "j"}, "spec": {**body, "template": {"spec": {"containers": [container]}}}}


def trainer(item: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = item["spec"]["template"]["spec"]["containers"][0]
    return container


def test_checkpoints_use_users_own_credentials_where_file_has_no_secret() -> None:
    source = resource(checkpoint={"path": "/c", "url": "s3://b", "secretRef": {"name": "access"}})
    secret = {"kind": "Secret", "metadata": {"name": "access"}}
    assert use_own_credentials(source, [secret]) == source
    assert use_own_credentials(source, [secret | {"kind": "ConfigMap"}])["spec"]["checkpoint"] == {
        "path": "/c",
        "url": "s3://b",
    }
    assert use_own_credentials(resource(), []) == resource()


def test_input_resource_is_not_mutated() -> None:
    source = resource(4)
    before = deepcopy(source)
    share_cpus(adapt_resource(source, Changes(1, 1, True, ["--b"]), PORT), 1, CPUS)
    assert source == before


@pytest.mark.parametrize(
    "kind", ["nvidia.com/gpu", "amd.com/gpu", "amd.com/cpx_nps4", "nvidia.com/mig-1g.5gb", "gpu.intel.com/xe"]
)
@pytest.mark.parametrize(("asked", "procs"), [("auto", 1), ("gpu", 1), (4, 4)])
def test_cpu_option_drops_gpus_and_derived_counts(kind: str, asked: int | str, procs: int) -> None:
    source = resource(4, kind, procPerNode=asked)
    assert count_pod_gpus(source["spec"]["template"]["spec"]) == 4
    adapted = adapt_resource(source, Changes(cpu=True), PORT)
    assert count_pod_gpus(adapted["spec"]["template"]["spec"]) == 0
    assert adapted["spec"]["procPerNode"] == procs


@pytest.mark.parametrize(
    ("written", "asked", "expected"),
    [
        (None, None, (None, 0)),
        ({"resetAfterSteps": 5}, None, (None, 0)),
        ({"maxRestarts": 2}, None, (None, 2)),
        ({"inPlaceRestarts": 1}, None, (1, 0)),
        ({"inPlaceRestarts": 1, "maxRestarts": 2}, 4, (1, 4)),
        (None, 4, (None, 4)),
    ],
)
def test_restarts_are_disabled_by_default(
    written: dict[str, int] | None, asked: int | None, expected: tuple[int | None, int]
) -> None:
    source = resource(recovery={"maxRestarts": 3, "countDisruptions": False, **(written or {})})
    recovery = adapt_resource(source, Changes(max_restarts=asked), PORT, written)["spec"]["recovery"]
    assert (recovery.get("inPlaceRestarts"), recovery["maxRestarts"]) == expected
    assert recovery["countDisruptions"] is False


def test_cpus_are_shared_among_all_workers_of_all_pods() -> None:
    assert trainer(share_cpus(resource(), 2, CPUS))["env"] == [{"name": "OMP_NUM_THREADS", "value": "2"}]
    assert trainer(share_cpus(resource(nodes=8), 8, CPUS))["env"][0]["value"] == "1"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1", ("0", "1")), ("GPU-abc", ("GPU-abc",)), ("", ()), ("-1", ()), (" 3 , 2 ", ("3", "2"))],
)
def test_visible_devices_limit_gpus(visible: str, expected: tuple[str, ...]) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_without_drivers_tool_device_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_gpus({}, devices=tmp_path) == ("0", "1")


def test_amd_gpus_are_counted_without_nvidia_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for node, gpu in enumerate(("0\n", "51140\n", "13045\n", "")):  # a CPU, two GPUs, and one of another container
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
        (tmp_path / "nodes" / str(node) / "gpu_id").write_text(gpu)
    assert find_gpus({}, devices=tmp_path, amd_nodes=tmp_path / "nodes") == ("0", "1")
    (tmp_path / "nvidia0").touch()
    assert find_gpus({}, devices=tmp_path, amd_nodes=tmp_path / "nodes") == ("0",)


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("j-1-0.j", "127.0.0.1"),
        ("j-1-0.j:29400", "127.0.0.1:29400"),
        ("tcp://j-1-1.j.ns.svc.cluster.local:1", "tcp://127.0.100.101:1"),
        ("j-1-1.j.ns.svc", "127.0.100.101"),
        ("xj-1-0.j", "xj-1-0.j"),
        ("j-1-0.jj", "j-1-0.jj"),
        ("j-1-0", "j-1-0"),
    ],
)
def test_names_of_pods_become_addresses(text: str, rewritten: str) -> None:
    assert rewrite_hosts(text, "j-1", "j") == rewritten


def test_code_missing_in_file_is_refused() -> None:
    here = [{"kind": "ConfigMap", "metadata": {"name": "ddp-code-1"}}]
    check_code(resource(), here)
    check_code(resource(code={"source": "configmap/ddp-code-1"}), here)
    check_code(resource(code={"source": "claim/sources/a"}), here)
    with pytest.raises(Unsuitable, match="source: ddp-code-2: not in the file; name the folder"):
        check_code(resource(code={"source": "configmap/ddp-code-2"}), here)
    with pytest.raises(
        Unsuitable, match=r"spec.code.source: a/b@sha256:1: no image is pulled on this machine; name the folder"
    ):
        check_code(resource(code={"source": "image/a/b@sha256:1"}), here)


def test_recorder_is_requested_in_the_training_container_with_the_checks_own_folder() -> None:
    former = {"name": "DDP_CHECK", "value": "/of/the/manifest"}
    containers = [{"name": "sidecar"}, {"name": "trainer", "env": [former, {"name": "A", "value": "1"}]}]
    resource: dict[str, Any] = {"spec": {"template": {"spec": {"containers": containers}}}}
    request_recorder(resource, "/records")
    assert containers[1]["env"] == [{"name": "A", "value": "1"}, {"name": "DDP_CHECK", "value": "/records"}]
    assert containers[0] == {"name": "sidecar"}
