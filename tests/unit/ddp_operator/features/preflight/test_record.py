"""The results of the preflight in the status."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api.status import PreflightStatus, Status
from ddp_operator.decide.hooks import Hooks
from ddp_operator.decide.views import Pods
from ddp_operator.features.preflight import FEATURE, build_preflight
from ddp_operator.reading.pages import decode_report
from ddp_operator.reading.parts import read_report_part
from tests.support.builders import child_pod, decode, page
from tests.support.decisions import RUNNING, STARTED, present, run_pass


def run(*pods: Any, text: str, status: Status = STARTED) -> Status:
    """Return the status after a pass with the report of pod 0."""
    return run_pass(*pods, text=text, status=status, hooks=Hooks((FEATURE,))).status


def test_measurements_are_kept_for_attempt() -> None:
    text = page(phase="Running", step=3, preflight={"done": ["allreduce"], "allReduceRate": 4e8})
    first = run(*RUNNING, text=text)
    assert first.preflight == PreflightStatus(all_reduce_megabytes_per_second="400")
    assert run(*RUNNING, status=first, text=page(phase="Running", step=4)).preflight == first.preflight


def test_slowest_pair_has_nodes_of_its_measurement() -> None:
    text = page(phase="Running", step=3, preflight={"pair": [0, 1], "pairRate": 2e9})
    first = run(child_pod(0, node="node-a"), child_pod(1, node="node-b"), text=text)
    assert present(first.preflight).slowest == "pods 0 and 1 (nodes node-a and node-b): 2000 MB/s"
    moved = [child_pod(0, node="elsewhere"), child_pod(1, node="node-b")]
    assert run(*moved, status=first, text=text).preflight == first.preflight


def test_measurements_have_their_units() -> None:
    measured = {
        "failed": ["other", "allreduce", "tcp"], "allReduceRate": 5e6, "pair": [1],
        "transport": "IB", "gpuDirect": True,
    }  # fmt: skip
    result = build_preflight(present(read_report_part(decode(page(preflight=measured)), "preflight").preflight), Pods())
    assert result.failed == ("tcp", "allreduce")
    assert (result.all_reduce_megabytes_per_second, result.slowest) == ("5", "")
    assert result.transport == "IB with GPUDirect RDMA"


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)
NAMES = ("failed", "dnsSeconds", "tcpSeconds", "allReduceSeconds", "allReduceRate", "transport", "pair", "pairRate")


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_report_gives_a_storable_status(members: dict[str, Any]) -> None:
    report = decode_report(json.dumps({"preflight": members}).encode("utf-8", "surrogatepass"))
    result = read_report_part(report, "preflight").preflight
    if result is not None:
        status = Status(preflight=build_preflight(result, Pods()))
        assert len(msgspec.json.encode(status)) < 2000
        msgspec.convert(msgspec.to_builtins(status), Status)
