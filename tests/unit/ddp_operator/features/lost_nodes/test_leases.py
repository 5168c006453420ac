"""The age of a Lease: by the clock of the API server, whatever the node's clock shows."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.features.lost_nodes import leases
from ddp_operator.features.lost_nodes.evidence import LeaseAge
from ddp_operator.features.lost_nodes.leases import LeaseReader, LeaseReading, measure_age
from ddp_operator.kube.client import ObjectNotFound
from tests.support.builders import NOW


def lease(*stored: str, **spec: Any) -> dict[str, Any]:
    fields = [{"manager": "kubelet", "time": time} for time in stored]
    return {"metadata": {"managedFields": fields}, "spec": {"leaseDurationSeconds": 40, **spec}}


def test_age_is_measured_from_the_last_stored_change() -> None:
    raw = lease("2026-11-20T11:00:00Z", "2026-11-20T11:59:52Z", renewTime="2026-11-20T10:00:00.000000Z")
    assert measure_age(raw, NOW) == LeaseReading(LeaseAge(8.0, 10.0))


def test_age_without_managed_fields_is_by_renew_time() -> None:
    raw = {"metadata": {}, "spec": {"leaseDurationSeconds": 20, "renewTime": "2026-11-20T11:59:30.000000Z"}}
    assert measure_age(raw, NOW) == LeaseReading(LeaseAge(30.0, 5.0))


@pytest.mark.parametrize("duration", [None, 0, -1, 10**9, "40"])
def test_odd_duration_is_the_usual_one(duration: Any) -> None:
    reading = measure_age(lease("2026-11-20T11:59:52Z", leaseDurationSeconds=duration), NOW)
    assert reading.age == LeaseAge(8.0, 10.0)


def test_lease_that_was_never_renewed_has_no_age() -> None:
    assert measure_age({}, NOW).age is None


class Client:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.server_time = None


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (Refused("no", reason="Forbidden"), "the operator may not read Leases in kube-node-lease"),
        (ObjectNotFound("no"), "node a has no Lease"),
        (ClusterError("no response"), "its Lease cannot be read: no response"),
    ],
)
async def test_lease_that_cannot_be_read_has_a_reason(
    error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(*args: object, **options: object) -> Any:
        raise error

    monkeypatch.setattr(leases, "call", call)
    reading = await LeaseReader(Client(None)).read("a")  # type: ignore[arg-type]
    assert reading.age is None
    assert problem in reading.problem
