"""The endpoint to which Hugging Face's Trainer and others post their progress."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.decide.report import build_progress
from ddp_pod.base.files import read_json, write_json
from ddp_pod.contract.names import TRAINER_STATUS_FILE
from ddp_pod.contract.report import PodReport
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.progress.trainer_status import TrainerStatus
from ddp_pod.rank.worker import _set_status_variables
from tests.support import ROOT
from tests.support.launcher_config import launcher_pod
from tests.unit.test_docs import fenced

# What KubeflowCallback of transformers 5.23.0 posts, at the beginning, after a step, and at the end.
BEGIN = {"progressPercentage": 0, "metrics": [{"name": "total_steps", "value": "24"}]}
STEP = {
    "lastUpdatedTime": "2026-11-22T21:57:19+00:00",
    "progressPercentage": 37,
    "estimatedRemainingSeconds": 12,
    "metrics": [
        {"name": "loss", "value": "1.637"},
        {"name": "grad_norm", "value": "3.057"},
        {"name": "learning_rate", "value": "3.125e-05"},
        {"name": "epoch", "value": "1.125"},
        {"name": "eval_loss", "value": "1.295"},
        {"name": "current_step", "value": "9"},
        {"name": "total_steps", "value": "24"},
        {"name": "current_epoch", "value": "1.12"},
    ],
}
END = {"progressPercentage": 100, "estimatedRemainingSeconds": 0, "metrics": [{"name": "train_loss", "value": "1.4"}]}


class Server:
    """A launcher's endpoint with the variables of its rank 1."""

    def __init__(self, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("metrics", "workers"):
            os.mkdir(os.path.join(runtime, name))
        record = {"pid": 1, "rank": 5, "localRank": 1, "restart": 0, "worldSize": 8}
        write_json(os.path.join(runtime, "workers", "1.json"), record)
        for name in ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        status = TrainerStatus(launcher_pod(runtime, nproc_per_node=2))
        self.ranks = RankReader(runtime)
        status.offer(MetricsEndpoint(self.ranks, lambda ranks: PodReport(), status.receive).serve(0))
        _set_status_variables(runtime, "1")
        self.url = os.environ["KUBEFLOW_TRAINER_SERVER_URL"]
        self.token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text()

    def post(self, body: object, *, url: str = "", token: str | None = None) -> tuple[int, Any]:
        host, _, path = (url or self.url).removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=60)
        text = body if isinstance(body, str) else json.dumps(body)
        head = {"Authorization": f"Bearer {self.token if token is None else token}", "Content-Type": "application/json"}
        connection.request("POST", f"/{path}", text, head)
        reply = connection.getresponse()
        status = reply.status
        content = reply.read()
        connection.close()
        return status, content

    def values(self) -> tuple[object, ...]:
        progress = build_progress(self.ranks.rank_progress(1))
        return () if progress is None else (progress.step, progress.total_steps, progress.percent, progress.loss)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with monkeypatch.context() as patches:
        yield Server(str(tmp_path), patches)
        os.environ.pop("KUBEFLOW_TRAINER_SERVER_URL", None)
        os.environ.pop("KUBEFLOW_TRAINER_SERVER_TOKEN", None)


def test_posted_status_becomes_progress_of_rank(server: Server) -> None:
    assert server.post({"trainerStatus": BEGIN}) == (200, json.dumps({"trainerStatus": BEGIN}).encode())
    assert server.values() == ()
    server.post({"trainerStatus": STEP})
    assert server.values() == (9, 24, "37.5%", "1.637")
    progress = server.ranks.rank_progress(1)
    assert (progress.rank, progress.world_size, progress.val_loss) == (5, 8.0, 1.295)
    server.post({"trainerStatus": END})  # it contains no step
    assert server.values() == (24, 24, "100.0%", "1.4")


def test_example_in_docs_posts_status(server: Server) -> None:
    page = (ROOT / "docs" / "your-script.md").read_text()
    (lines,) = [block for block in fenced(page, "python") if "trainerStatus" in block]
    exec(lines, {})
    assert server.values() == (9, 24, "37.5%", "1.637")


def test_percents_count_as_steps_if_script_posts_no_step(server: Server) -> None:
    for percent in (0, 10, 12):
        server.post({"trainerStatus": {"progressPercentage": percent}})
    assert server.values() == (12, 100, "12.0%", None)
    assert server.ranks.rank_progress(1).steps == 3


def test_counters_restart_with_new_process(server: Server) -> None:
    server.post({"trainerStatus": STEP})
    later = {**STEP, "metrics": [{"name": "step", "value": "11"}]}
    server.post({"trainerStatus": later}, url=server.url.rpartition("/")[0] + "/1")
    progress = server.ranks.rank_progress(1)
    assert (progress.step, progress.steps) == (11, 1)


@pytest.mark.parametrize(
    ("body", "changes", "status"),
    [
        ({"trainerStatus": STEP}, {"token": "another"}, 403),
        ({"trainerStatus": STEP}, {"rank": "2"}, 404),
        ("{", {}, 422),
        ({}, {}, 422),
        ({"trainerStatus": {"metrics": [3]}}, {}, 422),
        ("[" * 70_000, {}, 422),
        ({"trainerStatus": {"metrics": [{"name": "step", "value": "many"}]}}, {}, 200),
    ],
)
def test_unauthorized_or_invalid_post_changes_nothing(
    server: Server, body: object, changes: dict[str, str], status: int
) -> None:
    url = server.url.replace("/trainer-status/1/", f"/trainer-status/{changes.get('rank', '1')}/")
    assert server.post(body, url=url, token=changes.get("token"))[0] == status
    assert server.values() == ()


def test_exporter_page_precedes_posted_status_which_precedes_log(server: Server, tmp_path: Path) -> None:
    write_json(str(tmp_path / "metrics" / "1.log"), {"step": 1})
    assert server.values()[0] == 1
    server.post({"trainerStatus": STEP})
    assert server.values()[0] == 9
    (tmp_path / "metrics" / "1.prom").write_text("ddp_step 7\n")
    assert server.values()[0] == 7


def test_variables_of_kubeflow_are_kept_and_loopback_bypasses_proxy(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_json(str(tmp_path / TRAINER_STATUS_FILE))["port"] == int(server.url.split(":")[2].partition("/")[0])
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://theirs")
    _set_status_variables(str(tmp_path), "0")
    assert os.environ["KUBEFLOW_TRAINER_SERVER_URL"] == "https://theirs"
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    for name, value in (("http_proxy", "http://proxy"), ("no_proxy", "inside"), ("NO_PROXY", "")):
        monkeypatch.setenv(name, value)
    _set_status_variables(str(tmp_path), "0")
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == ("inside,127.0.0.1", "127.0.0.1")
