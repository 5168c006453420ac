"""The pod that stores the record of an ended job: no GPU, and only what its place needs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA
from ddp_operator.features.history.manifests import build_history_job
from tests.support.builders import NOW, Json, resource, template, trainer

GPU = {"limits": {"nvidia.com/gpu": "8", "memory": "64Mi"}}
DATA = {"name": "data", "mountPath": "/data"}


def build(**spec: Any) -> Json:
    """Return the pod's spec of an ended job with a data volume, a variable and GPUs."""
    container = trainer(resources=GPU, env=[{"name": "REGION", "value": "eu"}], volumeMounts=[DATA])
    pod = template(container, volumes=[{"name": "data", "hostPath": {"path": "/mnt"}}], nodeSelector={"gpu": "h200"})
    raw = resource(template=pod, **spec)
    raw["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    job = parse_resource(raw, SCHEMA)
    object.__setattr__(job, "status", replace(job.status, completion_time=NOW, first_run_time=NOW))
    child = build_history_job(job, "RECORD", "")
    assert "kueue.x-k8s.io/queue-name" not in child["metadata"]["labels"]
    return child["spec"]["template"]["spec"]


def test_pod_requests_no_gpu_and_no_gpu_node() -> None:
    pod = build(history={}, checkpoint={"path": "/ckpt", "claimName": "claim"})
    [container] = pod["containers"]
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}}
    assert "nodeSelector" not in pod


def test_pod_for_claim_lacks_other_mounts_and_variables() -> None:
    pod = build(history={}, checkpoint={"path": "/ckpt", "claimName": "claim"})
    assert [volume["name"] for volume in pod["volumes"]] == ["ddp-checkpoint", "ddp-launcher"]
    assert [variable["name"] for variable in pod["containers"][0]["env"]] == ["DDP_TERMINATION_LOG"]
    assert pod["containers"][0]["command"][-1].startswith("ddp-history/default/2026")


def test_pod_for_mounted_folder_has_its_volume() -> None:
    pod = build(history={}, checkpoint={"path": "/data/"})
    assert [volume["name"] for volume in pod["volumes"]] == ["data", "ddp-launcher"]


def test_pod_for_url_has_variables_mounts_and_secrets() -> None:
    history = {"url": "s3://team/$(X)", "secretRef": {"name": "keys"}}
    pod = build(history=history, checkpoint={"path": "/ckpt", "url": "s3://a/b", "secretRef": {"name": "first"}})
    [container] = pod["containers"]
    assert container["command"][3:5] == ["RECORD", "s3://team/$$(X)"]
    assert {"name": "REGION", "value": "eu"} in container["env"]
    assert [source["secretRef"]["name"] for source in container["envFrom"]] == ["first", "keys"]
    assert DATA in container["volumeMounts"]
