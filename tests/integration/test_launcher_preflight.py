"""The preflight of real pods: gloo between two torchrun nodes, before any worker starts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_pod.base.pod_setup import read_pod
from ddp_pod.contract.plan import PreflightConfig
from ddp_pod.features.preflight.probe import create_store
from ddp_pod.torchrun.store import host_store
from tests.support.launcher_config import encoded_config
from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process


def test_preflight_measures_all_reduce_and_page_has_results(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, time\nwhile not os.path.exists('enough'): time.sleep(0.05)\n")
    config = {"preflight": PreflightConfig(True, ("dns", "tcp", "allreduce"), 1)}
    job = LauncherPods(tmp_path, ["train.py"], nproc=2, config=config)
    try:
        job.start()
        for index in (0, 1):
            job.until_logged(index, "preflight: dns ")
        page = job.page()
        (tmp_path / "enough").touch()
        ended = [job.wait(index) for index in (0, 1)]
    finally:
        job.stop()
    assert [end.code for end in ended] == [0, 0], ended[0].log + ended[1].log
    assert " MB/s" in ended[1].log
    for check in ("dns", "tcp", "allreduce"):
        assert f'ddp_launcher_preflight_passed{{check="{check}"}} 1' in page
    (rate,) = (float(line.split()[1]) for line in page.splitlines() if line.startswith("ddp_launcher_all_reduce_bytes"))
    assert rate > 1e6


def test_failed_check_ends_pod_with_mode_fail(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    config = {"preflight": PreflightConfig(True, ("allreduce",), 1e15)}
    job = LauncherPods(tmp_path, ["train.py"], nodes=1, nproc=2, max_restarts=2, config=config)
    try:
        (ended,) = job.run()
    finally:
        job.stop()
    assert ended.code == 82, ended.log
    assert ended.message["category"] == "Network"
    assert ended.message["message"].startswith("the preflight failed: allreduce: ")
    assert ended.message["message"].endswith(" MB/s, below the required 1000000000 MB/s")
    assert not (tmp_path / "started").exists()


def test_preflight_measures_pairs_and_reports_transport(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    config = {"preflight": PreflightConfig(False, ("pairs",), 0, min_pair_bytes_per_second=1e15)}
    job = LauncherPods(tmp_path, ["train.py"], nodes=3, nproc=2, config=config)
    try:
        ended = job.run()
    finally:
        job.stop()
    assert [end.code for end in ended] == [0, 0, 0], ended[0].log
    for end in ended:
        assert re.search(
            r"over Socket, slowest pair of pods (0 and 1|0 and 2|1 and 2): \d+ MB/s$", end.log, re.MULTILINE
        )
        assert "MB/s, below the required 1000000000 MB/s; the median of 3 pairs is " in end.log


def test_probe_finds_store_that_listens_on_the_address_of_its_pod_only(tmp_path: Path) -> None:
    """As in a cluster: the store of pod 0 does not listen on localhost."""
    environment = {
        **encoded_config(nodes=2),
        "JOB_COMPLETION_INDEX": "0",
        "MASTER_ADDR": "train-1-0.train",
        "DDP_POD_IP": "127.0.0.2",
        "DDP_RENDEZVOUS_SECRET": "of these pods",
    }
    served = host_store("127.0.0.2", 0)
    pod = replace(read_pod(environment, str(tmp_path)), port=served.port)
    store = create_store(torch.distributed, pod, world_size=2)
    store.set("key", "value")
    assert served.get("key") == b"value"


def test_required_network_refuses_sockets(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')\n")
    config = {"preflight": PreflightConfig(False, ("allreduce",), 0, require=True, transports=("IB", "RoCE"))}
    job = LauncherPods(tmp_path, ["train.py"], config=config)
    try:
        ended = job.run()
    finally:
        job.stop()
    assert [end.code for end in ended] == [82, 82], ended[0].log
    assert {end.message["category"] for end in ended} == {"Network"}
    assert ended[0].message["message"] == (
        "the preflight failed: transport: traffic between pods uses Socket (the ranks have no GPU: gloo uses TCP); "
        "spec.preflight requires IB or RoCE"
    )
    assert not (tmp_path / "started").exists()
