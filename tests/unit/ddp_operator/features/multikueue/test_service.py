"""The reconciler and a Workload of MultiKueue in states that are rare in a cluster (contract/features/multikueue)."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import constants, other_kinds
from ddp_operator.decide.hooks import Hooks
from ddp_operator.features.multikueue import FEATURE
from ddp_operator.features.multikueue.service import MultiKueue
from tests.support.builders import resource
from tests.support.fake_cluster import ReconcilerHarness

LABELS = {constants.KUEUE_QUEUE_LABEL: "team"}
COPY = LABELS | {constants.KUEUE_ORIGIN_LABEL: "multikueue", constants.KUEUE_PREBUILT_WORKLOAD: "theirs"}


def build_hooks() -> Hooks:
    """Return this feature's hooks."""
    return Hooks([FEATURE], {FEATURE.name: MultiKueue()})


def start(
    monkeypatch: pytest.MonkeyPatch, item: Any, *conditions: str, **metadata: Any
) -> tuple[ReconcilerHarness, list[Any]]:
    """Return a job with a Workload whose conditions are True, and the patches of that Workload."""
    harness = ReconcilerHarness(item, build_hooks())
    meta = {"name": "w", "namespace": "default", "uid": "u", "resourceVersion": "1", "generation": 1, **metadata}
    known = [{"type": kind, "status": "True", "reason": "So", "message": ""} for kind in conditions]
    workload = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": meta, "spec": {}}
    patches: list[Any] = []

    async def kueue_object(kind: str, namespace: str | None, name: str) -> Any:
        return workload | {"status": {"conditions": known}} if kind == "Workload" else None

    async def patch_workload(stored: Any, patch: Any, *, part: str | None = None) -> None:
        patches.append(patch)

    monkeypatch.setattr(harness.cluster, "kueue_object", kueue_object)
    monkeypatch.setattr(harness.cluster, "patch_workload", patch_workload)
    return harness, patches


async def test_ended_job_finishes_its_evicted_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    item = resource(managedBy=other_kinds.MULTIKUEUE)
    item["metadata"]["labels"] = LABELS
    ended = {"type": "Succeeded", "status": "True", "reason": "So", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    item["status"] = {"phase": "Succeeded", "attempt": 1, "conditions": [ended]}
    harness, patches = start(monkeypatch, item, "QuotaReserved", "Evicted")
    await harness.reconcile()
    assert [condition["type"] for condition in patches[0]["status"]["conditions"]][-1] == "Finished"
    assert harness.jobs() == []


async def test_workload_of_another_owner_admits_no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    item = resource()
    item["metadata"]["labels"] = COPY
    owners = [{"uid": "another", "controller": True}]
    harness, patches = start(monkeypatch, item, "QuotaReserved", "Admitted", ownerReferences=owners)
    await harness.settle()
    assert harness.status.phase == "Suspended"
    assert "Workload theirs belongs to another object" in harness.condition("Suspended").message
    assert (harness.jobs(), patches) == ([], [])


async def test_job_of_multikueue_without_queue_is_rejected() -> None:
    harness = await ReconcilerHarness(hooks=build_hooks(), managedBy=other_kinds.MULTIKUEUE).settle()
    assert harness.status.phase == "Rejected"
    assert f"{constants.KUEUE_QUEUE_LABEL} is missing" in harness.condition("Accepted").message
    assert harness.jobs() == []
