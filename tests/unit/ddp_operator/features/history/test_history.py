"""The record of an ended job is stored before the job may be deleted, and its failure changes nothing else."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from ddp_operator.api.cluster_errors import Refused
from ddp_operator.api.record import Record, decode_record
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import history as feature
from ddp_operator.features.history.service import HistoryStore
from tests.support.builders import Json
from tests.support.fake_cluster import ReconcilerHarness

LOG = "2026-11-20T12:00:00.1Z [rank0]: step 1\n2026-11-20T12:00:01.2Z [rank1]: bye"
CLAIM = {"path": "/ckpt", "claimName": "claim"}


def storing(image: str = "") -> Hooks:
    return Hooks((feature.FEATURE,), {feature.FEATURE.name: HistoryStore(image)})


async def start(**spec: Any) -> ReconcilerHarness:
    """Return a training job of two pods with a history on its claim."""
    values = {"history": {}, "checkpoint": CLAIM, "recovery": {"maxRestarts": 0}, **spec}
    harness = ReconcilerHarness(hooks=storing(), **values)
    harness.cluster.log = LOG
    return await harness.train()


async def succeed(harness: ReconcilerHarness) -> ReconcilerHarness:
    for index in (0, 1):
        harness.end_pod(index)
    return await harness.settle()


def stored_job(harness: ReconcilerHarness) -> Json:
    [job] = [job for job in harness.cluster.store.list("Job") if job["metadata"]["name"] == "train-history"]
    return job


def read_stored(harness: ReconcilerHarness) -> Record:
    """Return the record that the pod gets."""
    [container] = stored_job(harness)["spec"]["template"]["spec"]["containers"]
    return decode_record(base64.b64decode(container["command"][3]))


async def end_history(harness: ReconcilerHarness, code: int, message: str = "") -> None:
    """End the pod that stores the record."""
    pods = [pod for pod in harness.cluster.store.list("Pod") if pod["metadata"]["name"].startswith("train-history")]
    pod = next(pod for pod in pods if pod["status"]["phase"] == "Pending")
    harness.cluster.store.hold(pod)
    harness.cluster.end(pod, code, message)
    await harness.settle()


async def test_record_has_final_status_and_lines_and_job_waits_for_it() -> None:
    harness = await succeed(await start(ttlSecondsAfterFinished=0))
    record = read_stored(harness)
    assert record.resource["status"]["phase"] == "Succeeded"
    assert [log.text for log in record.logs] == [LOG, LOG]
    assert record.note == ""
    assert harness.raw is not None
    await end_history(harness, 0)
    assert harness.raw is None


async def test_stored_record_is_named_and_its_job_deleted() -> None:
    harness = await succeed(await start())
    [container] = stored_job(harness)["spec"]["template"]["spec"]["containers"]
    await end_history(harness, 0)
    assert harness.state("HistoryStored") == ("True", "Stored")
    place, path = container["command"][4:]
    assert place == "/ckpt"
    assert f"claim/claim/{path}; " in harness.condition("HistoryStored").message
    assert "train-history" not in harness.jobs()
    assert harness.status.phase == "Succeeded"


async def test_lines_are_read_before_pods_are_deleted() -> None:
    harness = await start(cleanPodPolicy="All")
    harness.end_pod(1, 81)
    await harness.settle()
    calls = harness.cluster.calls
    assert max(number for number, call in enumerate(calls) if call.startswith("log ")) < calls.index("delete train-1")
    assert read_stored(harness).resource["status"]["phase"] == "Failed"


async def test_job_whose_pods_never_ran_is_stored_with_operators_image() -> None:
    hooks = storing("operator:1")
    harness = ReconcilerHarness(hooks=hooks, history={}, checkpoint=CLAIM, pendingDeadlineSeconds=60)
    harness.cluster.log = Refused("container is waiting to start", reason="Invalid")
    await harness.settle()
    harness.clock.advance(61)
    await harness.settle()
    assert harness.status.reason == "PendingDeadlineExceeded"
    record = read_stored(harness)
    assert (record.logs, record.resource["status"]["phase"]) == ((), "Failed")
    assert "waiting to start" in record.note
    pod = stored_job(harness)["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "operator:1"


@pytest.mark.parametrize(("code", "text"), [(81, "needs the Python package s3fs"), (1, "")])
async def test_failed_store_is_reported_and_changes_no_phase(code: int, text: str) -> None:
    harness = await succeed(await start())
    message = json.dumps({"version": 1, "category": "UserError", "message": text}) if text else ""
    for _ in range(4):
        if "HistoryStored" not in {condition.type for condition in harness.status.conditions}:
            await end_history(harness, code, message)
            harness.clock.advance(60)
            harness.cluster.settle()
            await harness.settle()
    assert harness.state("HistoryStored") == ("False", "NotStored")
    assert text in harness.condition("HistoryStored").message
    assert harness.status.phase == "Succeeded"
    assert "NotStored" in harness.events


async def test_refused_job_and_late_pod_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await start(ttlSecondsAfterFinished=1000)
    for index in (0, 1):
        harness.end_pod(index)
    monkeypatch.setattr(
        harness.cluster, "_admit", lambda job: (_ for _ in ()).throw(Refused("quota", reason="Forbidden"))
    )
    await harness.settle()
    assert harness.state("HistoryStored") == ("False", "NotStored")
    assert "quota" in harness.condition("HistoryStored").message

    late = await succeed(await start())
    late.clock.advance(15 * 60)
    await late.settle()
    assert late.state("HistoryStored") == ("False", "NotStored")
    assert "train-history" not in late.jobs()


async def test_job_without_history_makes_no_call() -> None:
    harness = await succeed(await start(history=None))
    assert not [call for call in harness.cluster.calls if call.startswith("log")]
    assert harness.jobs() == ["train-1"]
