"""A user's view of a complete cluster: kubelets that run pods, DNS, a scheduler, the garbage collector."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.counts import read_counts

from .conftest import DIGITS, UserNamespace, adapt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FAIL_ONCE = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(8):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.3)
if os.environ["RANK"] == "1" and os.environ["DDP_ATTEMPT"] == "1":
    raise RuntimeError("rank 1 was told to fail")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()  # else gloo's threads may abort the interpreter at its end
"""


def script_job(name: str, script: str, **spec: Any) -> dict[str, Any]:
    """Return the sample with another program."""
    job = adapt(DIGITS, name)
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["command"] = ["python3", "-c", script]
    container["args"] = []
    job["spec"].update(spec)
    return job


def test_sample_trains_and_reports_progress(cluster: UserNamespace) -> None:
    applied = cluster.apply(adapt(DIGITS))
    assert applied.returncode == 0, applied.stderr
    cluster.until(lambda: cluster.status("digits").get("progress", {}).get("totalSteps"), "progress")
    status = cluster.phase("digits", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert float(status["progress"]["valAccuracy"]) >= 0.95
    assert status["progress"]["percent"] == "100.0%"
    line = cluster.kubectl("get", "ddp", "digits").stdout.splitlines()
    assert line[0].split()[:7] == ["NAME", "PHASE", "REASON", "NODES", "PROGRESS", "ETA", "THROUGHPUT"]
    assert line[1].split()[:4] == ["digits", "Succeeded", "2", "100.0%"]
    events = cluster.kubectl("get", "events", "--field-selector", "involvedObject.kind=DDPTrainingJob").stdout
    assert "Rendezvoused" in events
    assert "Succeeded" in events


def test_failed_rank_is_named_and_group_recovers(cluster: UserNamespace) -> None:
    job = script_job("flaky", FAIL_ONCE, recovery={"inPlaceRestarts": 0, "maxRestarts": 1})
    assert cluster.apply(job).returncode == 0
    status = cluster.phase("flaky", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert read_counts(status)["counted"] == 1
    failure = status["lastFailure"]
    assert (failure["rank"], failure["podIndex"], failure["category"]) == (1, 1, "UserError")
    assert failure["message"] == "RuntimeError: rank 1 was told to fail"
    assert "dist.all_reduce" not in failure["message"]
    assert failure["nodeName"]
    assert cluster.kubectl("logs", failure["pod"]).returncode == 0, "the failed attempt's logs are gone"


def test_restart_in_place_needs_no_new_pod(cluster: UserNamespace) -> None:
    script = FAIL_ONCE.replace('os.environ["DDP_ATTEMPT"] == "1"', 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"')
    assert cluster.apply(script_job("inplace", script, recovery={"inPlaceRestarts": 1})).returncode == 0
    status = cluster.phase("inplace", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert (status["attempt"], status["restarts"]["inPlace"]) == (1, 1)
    assert len(cluster.pods("inplace")) == 2


def test_lost_pod_is_replaced(cluster: UserNamespace) -> None:
    script = FAIL_ONCE.replace("raise", "pass  # ").replace("range(8)", "range(60)")
    assert cluster.apply(script_job("loser", script)).returncode == 0
    cluster.until(lambda: "Training" in str(cluster.status("loser")) or _joined(cluster, "loser"), "all ranks joined")
    first = next(p for p in cluster.pods("loser") if p.metadata.name.startswith("loser-1-1-"))
    cluster.core.delete_namespaced_pod(first.metadata.name, cluster.namespace)
    status = cluster.phase("loser", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status


def test_scale_replaces_group_without_counting(cluster: UserNamespace) -> None:
    script = FAIL_ONCE.replace("raise", "pass  # ").replace("range(8)", "range(60)")
    assert cluster.apply(script_job("grow", script, nodes=1)).returncode == 0
    cluster.phase("grow", "Running")
    assert cluster.kubectl("scale", "ddp/grow", "--replicas=2").returncode == 0
    status = cluster.phase("grow", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", status
    assert status["nodes"]["desired"] == 2
    assert [read_counts(status)[kind] for kind in ("total", "counted", "free")] == [1, 0, 1]


def test_suspension_deletes_pods_and_resumption_continues_training(cluster: UserNamespace) -> None:
    script = FAIL_ONCE.replace("raise", "pass  # ").replace("range(8)", "range(30)")
    assert cluster.apply(script_job("pause", script)).returncode == 0
    cluster.phase("pause", "Running")
    cluster.kubectl("patch", "ddp", "pause", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    cluster.phase("pause", "Suspended")
    cluster.until(lambda: not cluster.pods("pause"), "no pod")
    cluster.kubectl("patch", "ddp", "pause", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    assert cluster.phase("pause", "Succeeded", "Failed")["phase"] == "Succeeded"


def test_images_typo_is_corrected_in_place(cluster: UserNamespace) -> None:
    job = script_job("typo", FAIL_ONCE.replace("raise", "pass  # "))
    container = job["spec"]["template"]["spec"]["containers"][0]
    image = container["image"]
    container["image"] = "registry.invalid/no/such-image:1"
    assert cluster.apply(job).returncode == 0
    cluster.until(
        lambda: "no/such-image" in str(cluster.status("typo").get("conditions")), "the image's name in status"
    )
    container["image"] = image
    applied = cluster.apply(job)
    assert applied.returncode == 0, applied.stderr
    status = cluster.phase("typo", "Succeeded", "Failed")
    assert (status["phase"], status["attempt"], status["restarts"]["all"]) == ("Succeeded", 1, 0), status


def test_bad_template_is_refused_in_status_before_any_child(cluster: UserNamespace) -> None:
    job = adapt(DIGITS, "bad")
    job["spec"]["template"]["spec"]["containers"][0]["imagePullPolcy"] = "Never"
    assert cluster.apply(job).returncode == 0
    status = cluster.phase("bad", "Rejected")
    (accepted,) = [c for c in status["conditions"] if c["type"] == "Accepted"]
    assert accepted["status"] == "False"
    assert 'unknown field "spec.template.spec.containers[0].imagePullPolcy"' in accepted["message"]
    assert cluster.kubectl("get", "job,svc", "-l", "ddp-operator.dev/job-name=bad", "-o", "name").stdout == ""


def test_missing_image_is_reported_once(cluster: UserNamespace) -> None:
    job = adapt(DIGITS, "imageless")
    container = job["spec"]["template"]["spec"]["containers"][0]
    container |= {"image": "localhost/nobody/has-this:1", "imagePullPolicy": "IfNotPresent"}
    assert cluster.apply(job).returncode == 0
    messages: set[str] = set()
    seen: list[str] = []

    def told_through_a_pause() -> bool:
        """Read the kubelet's state of one pod, and the status that the operator derives, until a second attempt."""
        for pod in sorted(cluster.pods("imageless"), key=lambda pod: str(pod.metadata.name))[:1]:
            for state in pod.status.container_statuses or ():
                if state.state.waiting is not None and state.state.waiting.reason not in seen[-1:]:
                    seen.append(state.state.waiting.reason)
        scheduled = [c for c in cluster.status("imageless").get("conditions", ()) if c["type"] == "Scheduled"]
        messages.update(c["message"] for c in scheduled if c["reason"] == "ImagePull" and "and 1 more" in c["message"])
        return bool(messages) and seen.count("ImagePullBackOff") >= 1 and seen[-1] == "ErrImagePull"

    cluster.until(told_through_a_pause, "a try, a pause and another try")
    assert len(messages) == 1, messages


def test_deleted_job_leaves_no_object(cluster: UserNamespace) -> None:
    assert cluster.apply(adapt(DIGITS)).returncode == 0
    cluster.phase("digits", "Running")
    assert cluster.kubectl("delete", "ddp", "digits").returncode == 0
    kinds = "job,pod,svc,cm"
    remaining = ("get", kinds, "-l", "ddp-operator.dev/job-name=digits", "-o", "name")
    cluster.until(lambda: not cluster.kubectl(*remaining).stdout, "the end of every child")


def _joined(cluster: UserNamespace, name: str) -> bool:
    conditions = cluster.status(name).get("conditions") or []
    return any(c["type"] == "Rendezvoused" and c["status"] == "True" for c in conditions)
