"""`ddp report` on a job in a cluster: from its status and Events, and from a Prometheus."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ddp_cli.__main__ import main
from ddp_cli.features.ui.cluster_job import ClusterData, read_job
from ddp_cli.features.ui.curves import build_curves
from ddp_cli.features.ui.job_page import JobPage
from ddp_cli.features.ui.render import render_saved
from ddp_cli.features.ui.run import RecordedRun, split_processes
from ddp_operator.api.kubeobjects import format_time
from tests.support.builders import NOW, resource

START = int(NOW.timestamp())
POINTS = [
    "time,restarts,epoch,step,loss,samples_per_second,validation_accuracy,checkpoint_step",
    f"{START + 10},0,1,10,0.9,100,,", f"{START + 20},0,1,20,0.5,110,0.7,20",
    f"{START + 60},1,1,25,0.45,105,0.7,20", f"{START + 70},1,2,40,0.3,x,0.8,40",
]  # fmt: skip


def job(**status: Any) -> dict[str, Any]:
    made = resource("digits", namespace="ml")
    made["metadata"] |= {"uid": "u", "creationTimestamp": format_time(NOW)}
    state = {
        "phase": "Succeeded", "attempt": 1, "nodes": {"desired": 2}, "startTime": format_time(NOW), "points": POINTS,
        "completionTime": format_time(NOW + timedelta(seconds=80)), "restarts": {"all": 1},
        "tracking": {"runId": "digits-1", "links": ["https://wandb.ai/e/p/runs/digits-1?a&b"]},
    }  # fmt: skip
    return made | {"status": state | status}


def event(reason: str, message: str, *, kind: str = "DDPTrainingJob", type: str = "Normal", at: int = 30) -> Any:
    about = {"kind": kind, "name": "digits-1-0-abcde" if kind == "Pod" else "digits"}
    time = format_time(NOW + timedelta(seconds=at))
    return {"reason": reason, "message": message, "type": type, "involvedObject": about, "lastTimestamp": time}


def list_points(run: RecordedRun, column: str) -> list[list[tuple[float, float]]]:
    """Return a column over time, in a part for each process of rank 0."""
    parts = split_processes(run.rows)
    return [[(row["time"] - run.start, row[column]) for row in part if column in row] for part in parts]


EVENTS = [
    event("FailureKilled", "attempt 1: rank 1 was killed", type="Warning"),
    event("Pulled", "image is there", kind="Pod"),
    event("Evicted", "no room", kind="Pod", type="Warning", at=35),
]


def test_figures_are_those_of_status_cut_where_training_was_interrupted() -> None:
    run = read_job(job(), ClusterData(EVENTS), NOW)
    assert list_points(run, "loss") == [[(10.0, 0.9), (20.0, 0.5)], [(60.0, 0.45), (70.0, 0.3)]]
    assert list_points(run, "samples_per_second") == [[(10.0, 100.0), (20.0, 110.0)], [(60.0, 105.0)]]
    assert run.checkpoints == [(20.0, 20.0), (70.0, 40.0)]
    (mark,) = run.marks
    assert (mark.label, mark.cause, mark.result) == ("Killed", "rank 1 was killed", "restarted")
    assert run.end == 80


def test_interruption_whose_event_was_deleted_has_the_cause_of_the_last_restart() -> None:
    restart = {"attempt": 1, "cause": "OOMKilled", "time": format_time(NOW + timedelta(seconds=30))}
    failure = {"attempt": 1, "rank": 5, "pod": "p", "category": "OOMKilled", "message": "memory limit", "exitCode": 137}
    status = {"lastRestart": restart, "lastFailure": failure}
    (mark,) = read_job(job(**status), ClusterData(), NOW).marks
    assert (mark.label, mark.time) == ("OOMKilled", 30.0)
    assert "rank 5" in mark.cause
    assert "memory limit" in mark.cause
    (kept,) = read_job(job(**status), ClusterData(EVENTS), NOW).marks
    assert kept.cause == "rank 1 was killed"


def test_page_has_charts_links_and_command() -> None:
    job_page = JobPage(read_job(job(), ClusterData(EVENTS), NOW), NOW)
    assert [chart["id"] for chart in build_curves(job_page.run)["charts"]] == ["loss", "rate", "accuracy"]
    page = render_saved(job_page)
    assert '<a href="https://wandb.ai/e/p/runs/digits-1?a&amp;b"' in page
    assert "python train.py" in page
    assert "example.com/train:1" in page
    assert ">Succeeded</span>" in page
    assert "ddp run" not in page


@pytest.fixture
def prometheus() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server with two attempts of a loss and the time of one rank's steps; it records its queries."""
    asked: list[dict[str, str]] = []

    class PrometheusHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append({name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()})
            query = asked[-1]["query"]
            results: list[dict[str, Any]] = []
            if "ddp_loss{" in query:
                points = [[START + 15 * n, str(1 / n) if n != 2 else "NaN"] for n in range(1, 4)]
                results = [
                    {"metric": {"ddp_attempt": "1"}, "values": points},
                    {"metric": {"ddp_attempt": "2"}, "values": [[START + 60, "0.2"]]},
                ]
            elif query.startswith("last_over_time"):
                named = {
                    "ddp_steps_total": "10",
                    "ddp_data_wait_seconds_total": "0",
                    "ddp_step_duration_seconds_sum": "5",
                    "ddp_compute_seconds_total": "4",
                }
                results = [
                    {"metric": {"__name__": name, "rank": "3"}, "value": [START, text]} for name, text in named.items()
                ]
            body = json.dumps({"data": {"result": results}} if self.path.startswith("/api/v1/query") else {}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), PrometheusHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_prometheus_has_more_than_status(prometheus: tuple[str, list[dict[str, str]]]) -> None:
    url, asked = prometheus
    run = read_job(job(attempt=2), ClusterData(), NOW, f"{url}/")
    assert list_points(run, "loss") == [[(15.0, 1.0), (45.0, 1 / 3)], [(60.0, 0.2)]]
    (rank,) = JobPage(run, NOW).ranks
    assert (rank.rank, rank.pod, rank.step_time, rank.own) == ("3", "", 0.5, 0.4)
    assert all('namespace="ml",ddp_job="digits"' in item["query"] for item in asked)
    assert {(item["start"], item["end"]) for item in asked if "start" in item} == {
        (str(START * 1.0), str(START + 80.0))
    }


def test_failing_prometheus_error_names_option(
    prometheus: tuple[str, list[dict[str, str]]],
) -> None:
    for url, words in (
        ("http://127.0.0.1:1", r"does not respond \(.*\); check --prometheus"),
        (f"{prometheus[0]}/elsewhere", "not the HTTP API of a Prometheus; check --prometheus"),
        ("prometheus:9090", "is not a URL; write for example http"),
    ):
        with pytest.raises(ValueError, match=words):
            read_job(job(), ClusterData(), NOW, url)


def test_local_run_precedes_cluster_job_and_missing_run_is_read_from_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    folder = tmp_path / "ddp-runs" / "digits-20260101-120000"
    folder.mkdir(parents=True)
    (folder / "status.yaml").write_text(json.dumps(job()))
    assert main(["report", "digits"]) == 0
    assert capsys.readouterr().out.strip() == "ddp-runs/digits-20260101-120000/report.html"
    assert main(["report", "other"]) == 4
    assert f"no cluster is configured ({tmp_path / 'none'} does not exist or is empty)" in capsys.readouterr().err
    assert main(["report", "digits", "-n", "ml"]) == 4
