"""The preflight: what is tried from which pod, and how its figures travel to the status."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from ddp_operator.api.status import PreflightStatus
from ddp_operator.launcher.contract import PREFLIGHT_CHECKS
from ddp_operator.launcher.pod import Pod, PreflightConfig
from ddp_operator.launcher.preflight import (
    build_preflight_rows,
    describe_preflight,
    find_partners,
    is_sum,
    run_preflight,
)
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
    assert run_preflight(None, pod(nodes=1), plan, [(0, 0, 1)]) == {"seconds": {}, "rate": None, "problems": {}}


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 65, 520, 1000, 5000])
def test_a_sum_over_any_number_of_ranks_is_known_as_right(ranks: int) -> None:
    def rounded(value: float) -> float:
        return float(struct.unpack("f", struct.pack("f", value))[0])  # as a tensor of 32-bit floats has it

    right = wrong = 1.0
    for _ in range(4):
        right, wrong = rounded(ranks * right), rounded((ranks - 1) * wrong)
    assert is_sum(right, ranks, 4)
    assert not is_sum(wrong, ranks, 4)


def test_too_little_bandwidth_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"seconds": 0.002, "rate": 30e6}
    monkeypatch.setattr("ddp_operator.launcher.preflight.try_all_reduce", lambda *arguments: figures)
    plan = PreflightConfig(True, ("allreduce",), 100e6)
    report = run_preflight(None, pod(), plan, [(0, 0, 3)])
    assert report["problems"] == {"allreduce": "30 MB/s, below the required 100 MB/s"}
    assert describe_preflight(report) == (
        "preflight: allreduce 2.0 ms, all-reduce 30 MB/s\n"
        "preflight: allreduce failed: 30 MB/s, below the required 100 MB/s"
    )


def test_figures_go_by_the_page_to_the_status() -> None:
    report: dict[str, Any] = {
        "seconds": {"dns": 0.0015, "allreduce": 0.0002},
        "rate": 1.25e9,
        "problems": {"tcp": "no connection"},
    }
    page = parse_page("\n".join(build_preflight_rows(report)) + "\n")
    assert page.preflight == PreflightStatus(
        failed=("tcp",),
        dns_milliseconds="1.5",
        all_reduce_milliseconds="0.2",
        all_reduce_megabytes_per_second="1250",
    )
    assert build_preflight_rows({}) == []
    assert parse_page("ddp_loss 1\n").preflight is None
