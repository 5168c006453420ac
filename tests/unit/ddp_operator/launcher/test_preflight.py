"""The preflight: what is tried from which pod, and how its figures travel to the status."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from typing import Any

import pytest

from ddp_operator.api.status import PreflightStatus, SlowestPair
from ddp_operator.launcher.contract import PREFLIGHT_CHECKS
from ddp_operator.launcher.pod import Pod, PreflightConfig
from ddp_operator.launcher.preflight import (
    build_preflight_rows,
    describe_preflight,
    find_fatal,
    find_partners,
    run_preflight,
)
from ddp_operator.launcher.probe import is_sum, list_pairs, list_rounds, read_outcome, sum_up
from ddp_operator.progress import parse_page
from tests.support.launcher_config import launcher_pod


def pod(node: int = 0, nodes: int = 3, master: str = "train-1-0.train", port: int = 29400) -> Pod:
    return launcher_pod("/nowhere", node=node, nodes=nodes, master=master, port=port, metrics_port=9400)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (0, [("train-1-0.train", 29400), ("train-1-1.train", 9400)]),
        (2, [("train-1-0.train", 29400), ("train-1-0.train", 9400)]),
    ],
)
def test_every_pod_tries_the_master_and_the_next_pod(node: int, expected: list[tuple[str, int]]) -> None:
    assert find_partners(pod(node)) == expected


def test_a_name_with_zeros_is_counted_up_at_its_index_alone() -> None:
    assert find_partners(pod(master="a-0-1-0.a-0"))[1][0] == "a-0-1-1.a-0"


def test_on_one_machine_only_the_rendezvous_is_tried() -> None:
    assert find_partners(pod(master="127.0.0.1")) == [("127.0.0.1", 29400)]


def test_what_cannot_be_reached_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        plan = PreflightConfig(False, ("dns", "tcp"), 0)
        report = run_preflight(None, pod(master="127.0.0.1", port=port), plan, [(0, 0, 3)])
        assert set(report["seconds"]) == {"dns"}
        assert report["problems"] == {"tcp": f"no connection to 127.0.0.1:{port}: Connection refused"}
    report = run_preflight(None, pod(master="train-1-0.invalid"), plan, [(0, 0, 3)])
    assert report["problems"]["dns"].startswith("train-1-0.invalid does not resolve: ")


def test_a_lone_rank_has_nothing_to_try() -> None:
    plan = PreflightConfig(True, PREFLIGHT_CHECKS, 0)
    report = run_preflight(None, pod(nodes=1), plan, [(0, 0, 1)])
    figures = dict.fromkeys(("rate", "transport", "direct", "pair"))
    assert report == {"seconds": {}, "problems": {}, **figures, "nccl_failed": False}


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 65, 520, 1000, 5000])
def test_a_sum_over_any_number_of_ranks_is_known_as_right(ranks: int) -> None:
    def rounded(value: float) -> float:
        return float(struct.unpack("f", struct.pack("f", value))[0])  # as a tensor of 32-bit floats has it

    right = wrong = 1.0
    for _ in range(4):
        right, wrong = rounded(ranks * right), rounded((ranks - 1) * wrong)
    assert is_sum(right, ranks, 4)
    assert not is_sum(wrong, ranks, 4)


def judge(monkeypatch: pytest.MonkeyPatch, plan: PreflightConfig, **figures: Any) -> dict[str, Any]:
    """Return the report of a probe with these figures."""
    found = {"seconds": 0.002, "rate": 30e6, "transport": "Socket", "direct": False, "reason": "", **figures}
    monkeypatch.setattr("ddp_operator.launcher.preflight.measure_network", lambda *arguments: found)
    return run_preflight(None, pod(), plan, [(0, 0, 3)])


def test_too_little_bandwidth_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PreflightConfig(True, ("allreduce",), 100e6)
    report = judge(monkeypatch, plan)
    assert report["problems"] == {"allreduce": "30 MB/s, below the required 100 MB/s"}
    assert describe_preflight(report) == (
        "preflight: allreduce 2.0 ms, all-reduce 30 MB/s, over Socket\n"
        "preflight: allreduce failed: 30 MB/s, below the required 100 MB/s"
    )


@pytest.mark.parametrize(
    ("transports", "require", "used", "told", "ends"),
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
def test_another_network_than_asked_for_ends_the_pod_only_where_it_is_required(
    transports: tuple[str, ...], require: bool, used: str, told: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PreflightConfig(True, ("allreduce",), 0, require=require, transports=transports)
    report = judge(monkeypatch, plan, transport=used)
    assert ("transport" in report["problems"]) is told
    assert bool(find_fatal(report, plan)) is ends


def test_a_network_that_the_log_does_not_tell_is_not_the_required_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PreflightConfig(False, ("allreduce",), 0, require=True)
    assert "does not say which transport" in find_fatal(judge(monkeypatch, plan, transport=""), plan)["transport"]
    assert not judge(monkeypatch, PreflightConfig(True, ("allreduce",), 0), transport="")["problems"]


def test_one_pod_has_no_network_that_could_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"seconds": 0.002, "rate": 30e6, "transport": "", "direct": False, "reason": ""}
    monkeypatch.setattr("ddp_operator.launcher.preflight.measure_network", lambda *arguments: found)
    report = run_preflight(None, pod(nodes=1), PreflightConfig(True, ("allreduce",), 0, require=True), [(0, 0, 2)])
    assert not report["problems"]


def test_what_is_required_of_the_network_ends_the_pod_and_a_name_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PreflightConfig(False, ("dns", "allreduce"), 0, require=True)
    monkeypatch.setattr("ddp_operator.launcher.preflight.try_dns", fail)
    monkeypatch.setattr("ddp_operator.launcher.preflight.measure_network", fail)
    report = run_preflight(None, pod(), plan, [(0, 0, 3)])
    assert set(report["problems"]) == {"dns", "allreduce"}
    assert set(find_fatal(report, plan)) == {"allreduce"}


def fail(*arguments: object) -> None:
    raise OSError("away")


def test_the_slowest_pair_is_named_and_the_pod_that_is_slow_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PreflightConfig(True, ("pairs",), 0, min_pair_bytes_per_second=10e9)
    pairs = [(0, 1, 40e9), (2, 3, 3e9), (0, 2, 2e9), (1, 3, 42e9), (0, 3, 41e9), (1, 2, 4e9)]
    report = judge(monkeypatch, plan, pairs=pairs)
    assert report["problems"]["pairs"] == (
        "pods 0 and 2 exchange 2000 MB/s, below the required 10000 MB/s; the median of 6 pairs is 22000 MB/s; "
        "pod 2 is slow with each other pod that was tried"
    )
    assert "slowest pair of pods 0 and 2: 2000 MB/s" in describe_preflight(report)
    assert "pairs" not in judge(monkeypatch, plan, pairs=[(0, 1, 10e9)])["problems"]
    slow = judge(monkeypatch, plan, pairs=[(0, 1, 9e9), (0, 2, 8e9), (1, 2, 7e9)])["problems"]["pairs"]
    assert "is slow with each other" not in slow, "where all are slow no pod is to blame"
    both = judge(monkeypatch, plan, pairs=[(0, 1, 9e9)])["problems"]["pairs"]
    assert both.endswith("the median of 1 pairs is 9000 MB/s")


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 9, 10, 17, 1000])
def test_pods_meet_two_by_two_and_no_two_meet_twice(nodes: int) -> None:
    rounds, met = list(list_rounds(nodes)), set()
    for partners in rounds:
        assert len(partners) == nodes
        for node, other in enumerate(partners):
            if other is not None:
                assert other != node
                assert partners[other] == node
                met.add((min(node, other), max(node, other)))
        assert partners.count(None) == nodes % 2
    assert len(met) == len(rounds) * (nodes // 2)
    if nodes <= 8:
        assert len(met) == nodes * (nodes - 1) // 2


def test_pairs_are_told_by_the_pods_they_are_and_by_the_slower_direction() -> None:
    rounds = [[1, 0, None], [None, 2, 1]]
    rates = [[9.0, 7.0, 0.0], [0.0, 3.0, 4.0]]
    assert list_pairs(rounds, rates, [2.0, 0.0, 1.0]) == [(2, 0, 7.0), (0, 1, 3.0)]


def test_the_worst_network_of_the_ranks_is_the_pods() -> None:
    def rank(transport: str, *, direct: bool = False, seconds: float = 1.0) -> dict[str, Any]:
        return {"seconds": seconds, "rate": 8 / seconds, "transport": transport, "direct": direct, "reason": transport}

    alone = rank("")
    fast, staged, slow = rank("IB", direct=True, seconds=2.0), rank("IB"), rank("Socket")
    assert sum_up([alone, fast]) == {**fast, "rate": 8.0}
    assert sum_up([fast, staged])["direct"] is False
    assert sum_up([alone, fast, slow, staged])["reason"] == "Socket"
    assert sum_up([alone])["transport"] == ""
    with pytest.raises(OSError, match="all-reduce of all ranks: away"):
        sum_up([fast, {"problem": "away"}])


def test_a_probe_may_tell_of_any_number_of_pairs() -> None:
    pairs = {"pairs": [[one, one + 1, 1e9] for one in range(4000)]}
    reader, writer = os.pipe()

    def tell() -> None:
        with open(writer, "w") as pipe:
            json.dump(pairs, pipe)

    child = threading.Thread(target=tell)
    child.start()
    assert read_outcome(reader, time.monotonic() + 30) == pairs
    child.join()
    os.close(reader)


@pytest.mark.parametrize(
    ("said", "ends", "expected"),
    [(b"", True, "the probe was killed"), (b'{"seconds": 0.', True, "the probe was killed"),
     (b'{"seconds": 0.', False, "no result in time")],
)  # fmt: skip
def test_a_probe_that_does_not_end_its_words_has_failed(said: bytes, ends: bool, expected: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, said)
    if ends:
        os.close(writer)
    assert read_outcome(reader, time.monotonic() + (30 if ends else 0.1)) == {"problem": expected}
    os.close(reader)
    if not ends:
        os.close(writer)


def test_figures_go_by_the_page_to_the_status() -> None:
    report: dict[str, Any] = {
        "seconds": {"dns": 0.0015, "allreduce": 0.0002},
        "rate": 1.25e9,
        "problems": {"tcp": "no connection", "transport": "Socket"},
        "transport": "Socket",
        "direct": False,
        "pair": (3, 12, 1.2e9),
    }
    page = parse_page("\n".join(build_preflight_rows(report)) + "\n")
    assert page.preflight == PreflightStatus(
        failed=("tcp", "transport"),
        dns_milliseconds="1.5",
        all_reduce_milliseconds="0.2",
        all_reduce_megabytes_per_second="1250",
        transport="Socket",
        gpu_direct=False,
        slowest_pair=SlowestPair(pods=(3, 12), megabytes_per_second="1200"),
    )
    assert build_preflight_rows({}) == []
    assert parse_page("ddp_loss 1\n").preflight is None
