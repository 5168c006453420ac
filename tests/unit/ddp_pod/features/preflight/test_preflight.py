"""The preflight: its checks in each pod, and how its measurements reach the status."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import struct
import threading
import time
from typing import Any

import pytest

from ddp_operator.api.status import PreflightStatus
from ddp_operator.decide.views import Pods
from ddp_operator.features.preflight import build_preflight
from ddp_pod.base.pod import Pod
from ddp_pod.contract.plan import PreflightConfig
from ddp_pod.features.preflight.checks import (
    PreflightReport,
    describe_preflight,
    find_fatal,
    find_partners,
    run_preflight,
    summarize_preflight,
)
from ddp_pod.features.preflight.probe import (
    PairRate,
    ProbeResult,
    is_sum,
    list_pairs,
    list_rounds,
    read_result,
    sum_up,
)
from tests.support.launcher_config import launcher_pod


def pod(node: int = 0, nodes: int = 3, master: str = "train-1-0.train", port: int = 29400) -> Pod:
    return launcher_pod("/nowhere", node=node, nodes=nodes, master=master, port=port, metrics_port=9400)


POD_0 = ("train-1-0.train", 29400)


@pytest.mark.parametrize(
    ("checking", "expected"),
    [
        (pod(0), [POD_0, ("train-1-1.train", 9400)]),
        (pod(2), [POD_0, ("train-1-0.train", 9400)]),
        (pod(master="a-0-1-0.a-0"), [("a-0-1-0.a-0", 29400), ("a-0-1-1.a-0", 9400)]),
        (pod(master="127.0.0.1"), [("127.0.0.1", 29400)]),  # all pods on one machine
        (dataclasses.replace(pod(0), elastic=True), [POD_0]),  # the next pod may not exist
        (dataclasses.replace(pod(0), spares=1), [POD_0]),
    ],
)
def test_every_pod_checks_master_and_next_pod(checking: Pod, expected: list[tuple[str, int]]) -> None:
    assert find_partners(checking) == expected


@pytest.mark.parametrize(("nodes", "ranks"), [(1, [(0, 0, 1)]), (3, [(0, 0, 2), (1, 1, 2)])])
def test_ranks_without_peers_in_other_pods_check_none(nodes: int, ranks: list[tuple[int, int, int]]) -> None:
    plan = PreflightConfig(True, ("dns", "tcp", "transport"), 0)
    resized = dataclasses.replace(pod(nodes=nodes, master="train-1-0.invalid"), elastic=True)
    assert run_preflight(None, resized, plan, ranks) == PreflightReport({}, {})


def test_unreachable_address_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        plan = PreflightConfig(False, ("dns", "tcp"), 0)
        report = run_preflight(None, pod(master="127.0.0.1", port=port), plan, [(0, 0, 3)])
        assert set(report.seconds) == {"dns"}
        assert report.problems == {"tcp": f"no connection to 127.0.0.1:{port}: Connection refused"}
    report = run_preflight(None, pod(master="train-1-0.invalid"), plan, [(0, 0, 3)])
    assert report.problems["dns"].startswith("train-1-0.invalid does not resolve: ")


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 65, 520, 1000, 5000])
def test_rounded_sum_is_accepted_and_missing_rank_detected(ranks: int) -> None:
    def rounded(value: float) -> float:
        return float(struct.unpack("f", struct.pack("f", value))[0])  # as a tensor of 32-bit floats has it

    right = 1.0
    wrong = 1.0
    for _ in range(4):
        right = rounded(ranks * right)
        wrong = rounded((ranks - 1) * wrong)
    assert is_sum(right, ranks, 4)
    assert not is_sum(wrong, ranks, 4)


def judge(monkeypatch: pytest.MonkeyPatch, plan: PreflightConfig, nodes: int = 3, **changes: Any) -> PreflightReport:
    """Return the report for a probe's result."""
    result = ProbeResult(seconds=0.002, rate=30e6, transport="Socket")._replace(**changes)
    monkeypatch.setattr("ddp_pod.features.preflight.checks.measure_network", lambda *arguments: result)
    return run_preflight(None, pod(nodes=nodes), plan, [(0, 0, 3)])


def test_low_bandwidth_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judge(monkeypatch, PreflightConfig(True, ("allreduce",), 100e6))
    assert report.problems == {"allreduce": "30 MB/s, below the required 100 MB/s"}
    measured, problem = describe_preflight(report).splitlines()
    assert all(text in measured for text in ("allreduce 2.0 ms", "30 MB/s", "Socket"))
    assert problem.endswith(report.problems["allreduce"])


@pytest.mark.parametrize(
    ("transports", "require", "used", "reported", "ends"),
    [
        ((), False, "Socket", False, False),
        ((), True, "Socket", True, True),
        ((), True, "IB", False, False),
        (("IB",), False, "Socket", True, False),
        (("IB",), True, "Socket", True, True),
        (("IB",), True, "RoCE", True, True),
        (("IB", "RoCE"), True, "RoCE", False, False),
        (("Socket",), True, "Socket", False, False),
    ],
)
def test_unexpected_transport_ends_pod_only_if_required(
    transports: tuple[str, ...], require: bool, used: str, reported: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PreflightConfig(True, ("allreduce",), 0, require=require, transports=transports)
    report = judge(monkeypatch, plan, transport=used)
    assert ("transport" in report.problems) is reported
    assert bool(find_fatal(report, plan)) is ends


@pytest.mark.parametrize(("require", "nodes", "is_fatal"), [(True, 3, True), (False, 3, False), (True, 1, False)])
def test_unknown_transport_violates_required_network_between_pods(
    monkeypatch: pytest.MonkeyPatch, require: bool, nodes: int, is_fatal: bool
) -> None:
    plan = PreflightConfig(True, ("allreduce",), 0, require=require)
    report = judge(monkeypatch, plan, nodes, transport="")
    assert set(find_fatal(report, plan)) == ({"transport"} if is_fatal else set())


def test_network_problem_ends_pod_and_dns_problem_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PreflightConfig(False, ("dns", "allreduce"), 0, require=True)
    monkeypatch.setattr("ddp_pod.features.preflight.checks.socket.getaddrinfo", fail)
    monkeypatch.setattr("ddp_pod.features.preflight.checks.measure_network", fail)
    report = run_preflight(None, pod(), plan, [(0, 0, 3)])
    assert set(report.problems) == {"dns", "allreduce"}
    assert set(find_fatal(report, plan)) == {"allreduce"}


def fail(*arguments: object, **options: object) -> None:
    raise OSError("away")


@pytest.mark.parametrize(
    ("rates", "facts", "slow_pod"),
    [
        (
            [(0, 1, 40e9), (2, 3, 3e9), (0, 2, 2e9), (1, 3, 42e9), (0, 3, 41e9), (1, 2, 4e9)],
            ["pods 0 and 2", "2000 MB/s", "required 10000 MB/s", "median of 6 pairs is 22000 MB/s"],
            "pod 2 is slow",
        ),
        ([(0, 1, 9e9), (0, 2, 8e9), (1, 2, 7e9)], ["pods 1 and 2"], ""),  # if all are slow, none is the root cause
        ([(0, 1, 9e9)], ["pods 0 and 1"], ""),
        ([(0, 1, 10e9)], [], ""),
    ],
)
def test_slowest_pair_and_its_slow_pod_are_named(
    monkeypatch: pytest.MonkeyPatch, rates: list[tuple[int, int, float]], facts: list[str], slow_pod: str
) -> None:
    plan = PreflightConfig(True, ("pairs",), 0, min_pair_bytes_per_second=10e9)
    report = judge(monkeypatch, plan, pairs=[PairRate(*rate) for rate in rates])
    assert ("pairs" in report.problems) is bool(facts)
    problem = report.problems.get("pairs", "")
    assert all(fact in problem for fact in facts)
    assert slow_pod in problem
    assert slow_pod or "is slow" not in problem
    assert "slowest pair of pods" in describe_preflight(report)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9, 10, 17, 1000])
def test_no_two_nodes_are_partners_twice(nodes: int) -> None:
    rounds = list(list_rounds(nodes))
    met = set()
    for partners in rounds:
        assert len(partners) == nodes
        for node, partner in enumerate(partners):
            if partner is not None:
                assert partner != node
                assert partners[partner] == node
                met.add((min(node, partner), max(node, partner)))
        assert partners.count(None) == nodes % 2
    assert len(met) == len(rounds) * (nodes // 2)
    if nodes <= 8:
        assert len(met) == nodes * (nodes - 1) // 2


def test_pairs_have_pod_indexes_and_slower_direction() -> None:
    rounds = [[1, 0, None], [None, 2, 1]]
    rates = [[9.0, 7.0, 0.0], [0.0, 3.0, 4.0]]
    assert list_pairs(rounds, rates, [2.0, 0.0, 1.0]) == [(2, 0, 7.0), (0, 1, 3.0)]


def test_slowest_network_of_ranks_is_that_of_pod() -> None:
    def rank(transport: str, *, direct: bool = False, seconds: float = 1.0) -> ProbeResult:
        return ProbeResult(seconds, rate=8 / seconds, transport=transport, direct=direct, reason=transport)

    alone = rank("")
    fast = rank("IB", direct=True, seconds=2.0)
    staged = rank("IB")
    slow = rank("Socket")
    assert sum_up([alone, fast]) == fast._replace(rate=8.0)
    assert sum_up([fast, staged]).direct is False
    assert sum_up([alone, fast, slow, staged]).reason == "Socket"
    assert sum_up([alone]).transport == ""
    with pytest.raises(OSError, match="all-reduce of all ranks: away"):
        sum_up([fast, ProbeResult(problem="away")])


def test_result_with_many_pairs_is_read_completely() -> None:
    result = ProbeResult(pairs=[PairRate(pod, pod + 1, 1e9) for pod in range(4000)])
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "w") as pipe:
            json.dump(result._asdict(), pipe)

    child = threading.Thread(target=write)
    child.start()
    assert read_result(reader, time.monotonic() + 30) == result
    child.join()
    os.close(reader)


@pytest.mark.parametrize(
    ("text", "ends", "expected"),
    [(b"", True, "the probe was killed"), (b'{"seconds": 0.', True, "the probe was killed"),
     (b'{"seconds": 0.', False, "no result in time")],
)  # fmt: skip
def test_incomplete_result_is_failure(text: bytes, ends: bool, expected: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, text)
    if ends:
        os.close(writer)
    assert read_result(reader, time.monotonic() + (30 if ends else 0.1)) == ProbeResult(problem=expected)
    os.close(reader)
    if not ends:
        os.close(writer)


def test_measurements_reach_status() -> None:
    report = PreflightReport(
        seconds={"dns": 0.0015, "allreduce": 0.0002},
        rate=1.25e9,
        problems={"tcp": "no connection", "transport": "Socket"},
        transport="Socket",
        direct=False,
        pair=PairRate(3, 12, 1.2e9),
    )
    result = summarize_preflight(report)
    assert result is not None
    assert build_preflight(result, Pods()) == PreflightStatus(
        failed=("tcp", "transport"),
        all_reduce_megabytes_per_second="1250",
        transport="Socket",
        slowest="pods 3 and 12: 1200 MB/s",
    )
    assert summarize_preflight(None) is None
