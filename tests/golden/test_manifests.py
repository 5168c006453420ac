"""Whole manifests against files that are read in review. ``pytest tests/golden --update-golden`` replaces them.

The launcher's source and its digest are replaced, so that an edit of the launcher changes no golden file.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ddp_cli.client.validation import is_of_kubernetes
from ddp_operator.api.crd import build_crd
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.children import build_children, load_launcher
from tests.support.builders import UID, resource, template, trainer
from tests.support.fabrics import complete

SAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "samples"
NEWEST = kubernetes_validate.latest_version()
GPU_NODE = {"limits": {"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi"}}
USER = template(
    trainer(
        command=["torchrun", "--tee", "3", "-m", "package.train", "--lr", "0.1"],
        env=[
            {"name": "NCCL_DEBUG", "value": "WARN"},
            {"name": "OMP_NUM_THREADS", "value": "2"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ],
        envFrom=[{"configMapRef": {"name": "settings"}}],
        ports=[{"name": "profiler", "containerPort": 6006}],
        resources={"limits": {"cpu": "8", "memory": "32Gi"}},
        securityContext={"capabilities": {"add": ["IPC_LOCK"]}},
        volumeMounts=[
            {"name": "data", "mountPath": "/data", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        terminationMessagePath="/tmp/end",
    ),
    metadata={"labels": {"team": "vision"}, "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
    initContainers=[
        {"name": "fetch", "image": "example.com/fetch:1"},
        {"name": "logs", "image": "example.com/logs:1", "restartPolicy": "Always"},
    ],
    volumes=[
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
    ],
    tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    nodeSelector={"pool": "train"},
    securityContext={"runAsUser": 1000, "fsGroup": 1000},
    imagePullSecrets=[{"name": "registry"}],
    terminationGracePeriodSeconds=90,
    hostNetwork=True,
    priorityClassName="high",
)
CASES: dict[str, dict[str, Any]] = {
    "gloo-two-nodes": yaml.safe_load((SAMPLES / "digits.yaml").read_text(encoding="utf-8")),
    "gpu-four-nodes": resource(
        "bert", namespace="ml", nodes=4, procPerNode="gpu", sharedMemory="64Gi",
        preflight={"mode": "Fail", "checks": ["tcp", "allreduce"], "minMegabytesPerSecond": 10000},
        template=template(trainer(args=["--config", "large.yaml"], resources=GPU_NODE)),
    ),
    "single-node": resource("one"),
    "static-rendezvous": resource("static", nodes=2, procPerNode=2, rendezvous={"backend": "static"}),
    "own-ports": resource(
        "ports", nodes=3, rendezvous={"port": 30500, "joinTimeoutSeconds": 60}, metrics={"port": 30600},
        recovery={"inPlaceRestarts": 0, "nonRetryableExitCodes": [3]},
    ),
    "user-template": resource(
        "user", nodes=2, procPerNode=4, template=USER, labels={"kueue.x-k8s.io/queue-name": "gpu"}
    ),
    "checkpoint-claim": resource(
        "ckpt", nodes=2, suspend=True, securityProfile="Restricted",
        checkpoint={"path": "/ckpt", "claimName": "checkpoints", "graceSeconds": 300},
    ),
    "code-in-a-config-map": resource(
        "code", nodes=2,
        code={"source": "configmap/ddp-code-1", "digest": "1" * 64, "revision": "2" * 12, "pip": "requirements.txt"},
    ),
    "code-on-a-claim": resource(
        "code", code={"source": "claim/sources/ddp/1.tar.gz", "digest": "1" * 64, "mountPath": "/src"},
        template=template(trainer(workingDir="/src/sub")),
    ),
    "code-in-an-image": resource(
        "code", code={"source": f"image/registry.example.com/code@sha256:{'3' * 64}", "digest": "1" * 64},
        template=template(trainer(), imagePullSecrets=[{"name": "registry"}]),
    ),
    "volcano-with-network-policy": resource(
        "gang", nodes=2,
        scheduling={"gang": "Volcano", "queue": "train", "placement": "Pack"},
        template=template(trainer(), priorityClassName="high"),
        networkPolicy={
            "enabled": True, "egressCidrs": ["10.0.0.0/8"],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    ),
    "native-gang": yaml.safe_load((SAMPLES / "native-gang.yaml").read_text(encoding="utf-8")),
    "coscheduling-spread": resource(
        "even", nodes=2,
        scheduling={"gang": "Coscheduling", "placement": "Spread", "topologyKey": "topology.kubernetes.io/zone"},
    ),
    "fabric-ib": yaml.safe_load((SAMPLES / "fabric.yaml").read_text(encoding="utf-8")),
    "fabric-tcpxo": resource(
        "tcpxo", **complete(
            "tcpxo", nodes=2,
            template=template(
                trainer(
                    resources=GPU_NODE, env=[{"name": "NCCL_MIN_NCHANNELS", "value": "8"}],
                    volumeMounts=[{"name": "data", "mountPath": "/data"}],
                ),
                initContainers=[{"name": "fetch", "image": "example.com/fetch:1"}],
                volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            ),
        ),
    ),
    "any-program": resource(
        "program", metrics={"logPatterns": [r"^iter (?P<step>\d+) loss=(?P<loss>\S+)$"]},
        watchdog={"stallSeconds": 60, "action": "Report"},
        template=template(trainer(command=["bash", "-c", "exec ./train --rank $RANK"])),
    ),
}  # fmt: skip


def build(raw: dict[str, Any], attempt: int) -> list[dict[str, Any]]:
    """Return the children of a manifest, processed like a user's file."""
    stored = dict(parse_manifest(yaml.safe_dump(raw), SCHEMA).resource)
    stored["metadata"] = {**stored["metadata"], "uid": UID}
    return build_children(parse_resource(stored, SCHEMA), attempt=attempt, nodes=stored["spec"]["nodes"])


def normalised(children: list[dict[str, Any]]) -> str:
    """Return the children as YAML that holds nothing of this version's launcher."""
    launcher = load_launcher()
    children = copy.deepcopy(children)
    for child in children:
        if "data" in child:
            assert child["data"] == {"launcher.py": launcher.bootstrap}
            child["data"] = {"launcher.py": "the source of launcher.py"}
            child["binaryData"] = {"launcher.zip": "the archive"}
    text = yaml.safe_dump_all(children, sort_keys=False, width=120)
    assert launcher.digest[:12] in text
    return text.replace(launcher.digest[:12], "0123456789ab")


@pytest.mark.parametrize("name", CASES)
def test_children_of_job_are_as_kept(name: str, golden: Callable[[str, str], None]) -> None:
    attempt = 2 if name == "gpu-four-nodes" else 1
    golden(f"manifests/{name}.yaml", normalised(build(CASES[name], attempt)))


@pytest.mark.parametrize("version", ["1.31", NEWEST])
@pytest.mark.parametrize("name", CASES)
def test_children_are_valid_in_kubernetes(name: str, version: str) -> None:
    children = build(CASES[name], 1)
    is_native = any(child["kind"] == "PodGroup" and is_of_kubernetes(child) for child in children)
    if is_native and version != NEWEST:
        version = "1.36"  # the oldest with PodGroups
    for child in children:
        if child["kind"] == "PodGroup" and not is_native:
            continue  # Volcano's and the plug-in's: no kind of Kubernetes' own
        if child["kind"] == "PodGroup" and version != NEWEST:
            child = child | {"apiVersion": "scheduling.k8s.io/v1alpha2"}
        kubernetes_validate.validate(child, version, strict=True)


def test_validation_of_kept_manifests_can_fail() -> None:
    [_, service, *_] = build(CASES["single-node"], 1)
    service["spec"]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, NEWEST, strict=True)


def test_every_golden_file_has_its_test() -> None:
    kept = {path.stem for path in (Path(__file__).parent / "manifests").glob("*.yaml")}
    assert kept == set(CASES)


def test_columns_of_kubectl_get_are_as_kept(golden: Callable[[str, str], None]) -> None:
    [version] = build_crd(SCHEMA)["spec"]["versions"]
    columns = version["additionalPrinterColumns"]
    width = max(len(column["name"]) for column in columns)
    lines = [
        f"{column['name']:<{width}}  {column['type']:<8} {column['jsonPath']}" + "  (wide)" * column.get("priority", 0)
        for column in columns
    ]
    golden("printer-columns.txt", "\n".join(lines) + "\n")
