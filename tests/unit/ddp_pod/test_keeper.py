"""The ranks' progress, as the launcher keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_pod.base.runtime_files import RUN_STEP_FILE
from ddp_pod.contract.plan import WatchdogConfig
from ddp_pod.progress.keeper import ProgressKeeper, find_interval
from ddp_pod.progress.rank_progress import RankReader
from tests.support.launcher_config import launcher_pod


@pytest.mark.parametrize(
    ("nodes", "node", "pages", "step"),
    [
        (2, 0, {0: "ddp_step 7\n", 1: "ddp_step 9\n"}, {"step": 9.0}),
        (2, 0, {}, {}),
        (2, 1, {0: "ddp_step 7\n"}, None),
        (1, 0, {0: "ddp_step 7\n"}, None),
    ],
)
def test_reading_is_passed_on_and_pod_0_keeps_the_step_for_its_peers(
    tmp_path: Path, nodes: int, node: int, pages: dict[int, str], step: object
) -> None:
    (tmp_path / "metrics").mkdir()
    for rank, text in pages.items():
        (tmp_path / f"metrics/{rank}.prom").write_text(text)
    seen: list[object] = []
    reader = RankReader(str(tmp_path))
    ProgressKeeper(launcher_pod(tmp_path, nodes=nodes, node=node), reader, lambda ranks: seen.append([*ranks])).read()
    assert seen == [[*pages]]
    file = tmp_path / RUN_STEP_FILE
    assert (json.loads(file.read_text()) if file.exists() else None) == step


@pytest.mark.parametrize(("start", "stall", "interval"), [(100, 8, 2.0), (0.1, 8, 0.1), (900, 300, 5.0)])
def test_interval_is_a_part_of_the_shortest_budget(start: float, stall: float, interval: float) -> None:
    assert find_interval(WatchdogConfig(start, stall, 1000, "Restart")) == interval
    assert find_interval(None) == 5.0
