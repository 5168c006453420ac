"""Faults in what the operator can do without: they are counted and logged once, and everything else continues."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_operator.api import faults
from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.faults import MOST_LOGGED, PERIOD, FaultLog, contain, name_object, parse_each
from tests.support.odd_objects import ODD_VALUES


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FaultLog:
    """The faults of a test."""
    fresh = FaultLog(clock=lambda: 0.0)
    monkeypatch.setattr(faults, "FAULTS", fresh)
    return fresh


def read_spec(item: Any) -> Any:
    return item["spec"]["a"]


def test_odd_items_are_left_out_and_logged_once(log: FaultLog, caplog: pytest.LogCaptureFixture) -> None:
    odd = {"metadata": {"namespace": "team", "name": "x"}, "spec": "text"}
    for _ in range(3):
        assert list(parse_each("Workload", [{"spec": {"a": 1}}, odd, None, {"spec": {"a": 2}}], read_spec)) == [1, 2]
    assert log.counts == {"Workload": 6}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("Workload team/x is left out: TypeError: string indices must be integers")
    assert "(test_faults.py:" in messages[0]


@pytest.mark.parametrize("error", [ClusterError("timeout"), Refused("no", reason="Forbidden")])
def test_errors_of_api_server_are_not_contained(log: FaultLog, error: Exception) -> None:
    with pytest.raises(type(error)), contain("view", "job"):
        raise error
    assert log.counts == {}


def test_faults_of_many_objects_fill_no_log(log: FaultLog, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3 * MOST_LOGGED):
        log.add("Pod", str(number), ValueError("x"))
    assert len(caplog.records) == MOST_LOGGED + 1
    assert log.counts["Pod"] == 3 * MOST_LOGGED
    log._clock = lambda: PERIOD
    log.add("Pod", "0", ValueError("x"))
    assert len(caplog.records) == MOST_LOGGED + 2


@pytest.mark.parametrize("value", ODD_VALUES.values(), ids=ODD_VALUES)
def test_object_of_any_shape_has_a_name(value: Any) -> None:
    for item in (value, {"metadata": value}, {"metadata": {"name": value, "namespace": value}}):
        assert len(name_object(item)) <= 601
