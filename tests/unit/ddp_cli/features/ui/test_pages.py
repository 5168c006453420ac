"""`ddp report` and `Job.report` on runs of this machine and on records of ended jobs."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_cli import __main__ as cli
from ddp_cli.client import hooks
from ddp_cli.client.api import Api, Object, api_path, job_path
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ApiError
from ddp_cli.client.job import Job
from ddp_cli.features import FEATURES
from ddp_cli.features.ui.render import render_parts
from ddp_cli.features.ui.sources import ClusterJobs
from ddp_operator.api import constants
from tests.support.builders import page as build_report
from tests.support.builders import resource
from tests.support.full_status import build_full_status
from tests.unit.ddp_cli.client.test_records import build_record, open_at, store
from tests.unit.ddp_cli.commands.test_local_runs import make_stored_run
from tests.unit.ddp_cli.features.ui.test_rows import TRAINING


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hooks, "_used", FEATURES)
    return tmp_path


SLOW = {"rank": 1, "ratio": "1.7", "cause": "compute"}


class PodsApi(Api):
    """A cluster with a job of two pods with one rank each, whose reports may be forbidden."""

    def __init__(self, *, is_forbidden: bool = False) -> None:
        self.namespace = self.home = "team"
        self._chosen = True
        self._is_forbidden = is_forbidden
        self.job = resource("train", namespace="team")
        self.job["metadata"]["uid"] = "u"
        self.job["status"] = {"phase": "Running", "attempt": 1, "conditions": TRAINING, "stragglers": [SLOW]}

    def request(self, method: str, path: str, query: Any = None, body: Any = None, content_type: str = "") -> Object:
        if path == job_path("team", "train"):
            return self.job
        if path == job_path("team"):
            return {"items": [self.job], "metadata": {"resourceVersion": "1"}}
        lists = {
            api_path("v1", "pods", "team"): list(map(self._build_pod, (0, 1))),
            api_path("v1", "events", "team"): [],
        }
        if path not in lists:
            raise ApiError("not here", 404)
        return {"items": lists[path], "metadata": {"resourceVersion": "1"}}

    @staticmethod
    def _build_pod(index: int) -> Object:
        labels = {constants.LABEL_JOB_NAME: "train", constants.LABEL_ATTEMPT: "1"}
        metadata = {"name": f"train-1-{index}-x", "namespace": "team", "uid": f"p{index}", "labels": labels}
        metadata["annotations"] = {constants.ANNOTATION_COMPLETION_INDEX: str(index)}
        spec = {"nodeName": f"gpu-{index}", "containers": [{"name": "trainer"}]}
        return {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}

    def lines(self, path: str, query: Any = None, *, timeout: float = 30.0) -> Any:
        raise ApiError("no stream here", 404)

    def read(self, path: str, limit: int, seconds: float) -> bytes:
        if self._is_forbidden:
            raise ApiError("pods/proxy is forbidden", 403)
        match = re.search(r"/train-1-(\d)-x:\d+/proxy/(\w+)$", path)
        assert match is not None
        if match[2] == "points":
            rows = [f"{1e9 + step},{step},{1 / step}" for step in range(1, 301)]
            return "\n".join(["time,step,loss", *rows]).encode()
        counters = {"steps": 10, "step": 10, "stepSeconds": 2.0, "dataSeconds": 0.1, "computeSeconds": 1.0}
        return build_report(ranks=[{"rank": int(match[1]), **counters}]).encode()


def test_report_of_a_job_has_the_ranks_the_points_and_the_advice_of_its_live_page() -> None:
    api = PodsApi()
    report = Job(ClusterBackend(api), "train", {}).report()
    assert "Rank 1 runs in pod train-1-1-x on gpu-1. Look at its node" in report
    assert "<td>gpu-0</td>" in report
    assert "0.00333" in report, "the loss of the last of the 300 points of pod 0"
    live = ClusterJobs(api, everywhere=False)
    live._jobs = {("team", "train"): api.job}
    live.renew("job/team/train")
    while "gpu-1. Look" not in (now := render_parts(live.read_page("job/team/train"))["now"]):
        time.sleep(0.01)
    assert now in report


def test_report_without_the_right_to_read_pods_states_it() -> None:
    report = Job(ClusterBackend(PodsApi(is_forbidden=True)), "train", {}).report()
    assert "The ranks of some pods cannot be read: pods/proxy is forbidden" in report
    assert "Look at its node" in report
    assert "runs in pod" not in report


def test_record_of_ended_job_has_a_report(folder: Path) -> None:
    store(folder, "20261120T120004Z", build_record())
    page = open_at(folder).report()
    assert "KeyError" in page
    assert "the job failed" in page
    assert "ddp delete" not in page
    assert f"ddp why train -n team --history {folder}" in page


@pytest.mark.parametrize(("status", "is_left_out"), [([1], True), ({"phase": "Frozen"}, True), (None, False)])
def test_run_with_an_unreadable_status_has_a_report(
    status: object, is_left_out: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_stored_run(build_full_status() if status is None else status)
    assert cli.main(["report", "--local"]) == 0
    shown = capsys.readouterr()
    assert ("cannot be read and is left out" in shown.err) == is_left_out
    assert shown.out.strip() == str(run.report)
    assert "</html>" in run.report.read_text()


def test_run_with_damaged_files_has_a_report() -> None:
    run = make_stored_run(build_full_status())
    run.metrics.write_text(f"time,step\n1,2\n3,{'9' * 200_000}\n")
    run.environment.write_text("[" * 100_000)
    assert cli.main(["report", "--local"]) == 0
    assert "</html>" in run.report.read_text()
