"""A real Prometheus scrapes a real `ddp run` and a real operator; every panel and every rule is evaluated on it."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from ddp_cli.features.ui.cluster_job import ClusterData, read_job
from ddp_cli.features.ui.curves import build_curves
from ddp_cli.features.ui.run import read_run
from ddp_operator.manager.settings import Settings
from tests.support import PATIENCE
from tests.support.builders import job_manifest
from tests.support.ddp_run import DdpRun
from tests.support.ports import HeldPort, hold_row
from tests.support.running_operator import RunningOperator
from tests.support.standin import ClusterActors, StandIn

from .test_monitoring_rules import BOARDS, MONITORING, ROOT, SERIES, panels, rules

pytestmark = [pytest.mark.nightly, pytest.mark.prometheus]

SAMPLE = (ROOT / "deploy" / "samples" / "checkpoint.yaml").read_text()
ARGUMENTS = ("--epochs", "4", "--clip-norm", "5", "--log-every", "5")
# Series that a run on CPUs does not export.
NEEDS_A_GPU = {"ddp_gpu_memory_peak_bytes", "ddp_operator_gpu_seconds_total"}
# Series read from the log alone, of a script that does not count its samples.
NEEDS_A_LOG = {"ddp_global_samples_per_second"}


@dataclass
class PrometheusServer:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of one API call. A refused call fails with Prometheus's message."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:
                    raise ConnectionError("not ready yet") from None
                raise AssertionError(f"{parameters}: {json.load(error)['error']}") from None

    def until(self, expr: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression has a value."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(OSError):  # Prometheus starts
                if self.get("query", query=expr)["result"]:
                    return
            assert time.monotonic() < deadline, f"no value: {expr}"
            time.sleep(0.2)


@dataclass
class ScrapedRun:
    """The scraped series, and the time of the scrapes."""

    prometheus: PrometheusServer
    run_folder: Path
    begin: float
    end: float

    def values(self, expr: str) -> list[float]:
        """Return every finite value of an expression during the scraped time."""
        filled = (
            expr.replace("$__rate_interval", "10s").replace("$__range", "60s")
            .replace('="$namespace"', '="local"').replace('"$ddp_job"', '"run"')
            .replace("$namespace", ".*").replace("$cluster", "test")
        )  # fmt: skip
        result = self.prometheus.get("query_range", query=filled, start=str(self.begin), end=str(self.end), step="1")
        values = [float(value) for series in result["result"] for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]


@contextmanager
def serve_page(page: str) -> Iterator[int]:
    """Respond to every request with this page. Return the port."""

    class PageHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), PageHandler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def configure(folder: Path, ddp_ports: list[int], operator_port: int, gpu_port: int) -> Path:
    """Write this repository's configuration with this test's ports, a short interval, the operator and the GPUs."""
    config = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(path) for path in sorted((MONITORING / "alerts").glob("*.yaml"))]
    (job,) = config["scrape_configs"]
    job["static_configs"][0]["targets"] = [f"127.0.0.1:{port}" for port in ddp_ports]
    job["static_configs"][0]["labels"]["cluster"] = "test"
    for name, port in (("operator", operator_port), ("dcgm-exporter", gpu_port)):
        results = {"targets": [f"127.0.0.1:{port}"], "labels": {"cluster": "test"}}
        config["scrape_configs"].append({"job_name": name, "honor_labels": True, "static_configs": [results]})
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


async def submit_jobs(kubeconfig: Path, count: int, page: int) -> None:
    """Give the operator work in every second; the first job's pods have the page of the real run."""
    async with ClusterActors(kubeconfig) as actors:
        await actors.create(job_manifest("trains", metrics={"port": page}))
        for index in (0, 1):
            await actors.run_pod("trains-1", index)
        for index in range(count):
            await actors.create(job_manifest(f"job-{index}"))
            await actors.child_job(f"job-{index}-1")
            await asyncio.sleep(1)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScrapedRun]:
    """A run that has ended and an operator that has served jobs, both scraped from beginning to end."""
    folder = tmp_path_factory.mktemp("monitoring")
    with ExitStack() as stack:
        base = stack.enter_context(hold_row(2))
        port = stack.enter_context(HeldPort()).number
        kubeconfig = stack.enter_context(StandIn()).write_kubeconfig(folder)
        settings = Settings(kubeconfig=str(kubeconfig), health_port=0)
        operator = stack.enter_context(RunningOperator(settings).start())
        # As dcgm-exporter writes them: the labels are those of the pod that holds the GPU.
        labels = f'gpu="0", UUID="GPU-0", modelName="H100", namespace="local", pod="127.0.0.1:{base}"'
        figures = {"GPU_UTIL": 93, "POWER_USAGE": 512.5, "XID_ERRORS": 0, "FB_USED": 60_000, "FB_FREE": 20_000}
        page = "".join(f"DCGM_FI_DEV_{name}{{{labels}}} {value}\n" for name, value in figures.items())
        gpus = stack.enter_context(serve_page(page))
        config = configure(folder, [base, base + 1], operator.operator.health.port, gpus)
        command = [
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ]  # fmt: skip
        log = stack.enter_context((folder / "prometheus.log").open("wb"))
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        stack.callback(server.wait, PATIENCE)
        stack.callback(server.terminate)
        prometheus = PrometheusServer(f"http://127.0.0.1:{port}")
        begin = time.time()
        options = ["--quiet", "--metrics-port", str(base), "--", *ARGUMENTS]
        with DdpRun(folder, SAMPLE, options) as run:
            prometheus.until("ddp_operator_queue_depth")
            asyncio.run(submit_jobs(kubeconfig, 5, base))
            assert run.wait() == 0, run.output
            run_folder = run.run_folder
        yield ScrapedRun(prometheus, run_folder, begin, time.time())


def test_every_panel_has_values(watched: ScrapedRun) -> None:
    empty = []
    for path in BOARDS:
        for panel in panels(path):
            for target in panel["targets"]:
                if not watched.values(target["expr"]) and not set(SERIES.findall(target["expr"])) <= NEEDS_A_GPU:
                    empty.append(f"{path.stem}: {panel['title']}: {target['expr']}")
    assert empty == []


def test_every_annotation_and_variable_query_is_valid(watched: ScrapedRun) -> None:
    for path in BOARDS:
        board = json.loads(path.read_text())
        for annotation in board["annotations"].get("list", []):
            watched.values(annotation["expr"])
        for variable in board["templating"]["list"]:
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            if asked is None:
                assert variable["type"] == "datasource"
                continue
            series = asked[1].replace('="$namespace"', '="local"').replace("$cluster", "test")
            result = watched.prometheus.get(
                f"label/{asked[2]}/values", **{"match[]": series, "start": str(watched.begin), "end": str(watched.end)}
            )
            assert result, variable["query"]


def test_every_rule_is_evaluated_and_its_series_exist(watched: ScrapedRun) -> None:
    groups = watched.prometheus.get("rules")["groups"]
    evaluated = {rule["name"]: rule for group in groups for rule in group["rules"]}
    expected = [rule for path in sorted((MONITORING / "alerts").glob("*.yaml")) for rule in rules(path)]
    for rule in expected:
        result = evaluated[rule.get("alert") or rule["record"]]
        assert (result["health"], result.get("lastError")) == ("ok", None), rule
        series = set(SERIES.findall(rule["expr"])) - NEEDS_A_LOG - NEEDS_A_GPU
        for name in series | set(re.findall(r"\bddp:[\w:]+", rule["expr"])):
            assert watched.values(f"count({name})"), name
    for rule in expected:
        of_gpus = (
            "DCGM" in rule["expr"] or "ddp:gpu_" in rule["expr"] or set(SERIES.findall(rule["expr"])) & NEEDS_A_GPU
        )
        if "record" in rule and not of_gpus:
            assert watched.values(rule["record"])


def test_successful_run_fires_no_alert(watched: ScrapedRun) -> None:
    assert watched.values('ALERTS{alertstate="firing"}') == []


def test_figures_are_those_of_run(watched: ScrapedRun) -> None:
    assert max(watched.values("max(ddp_world_size)")) == 2
    assert max(watched.values("max(ddp_planned_epochs)")) == 4
    assert max(watched.values("max(ddp_checkpoint_step)")) > 0
    done = watched.values("max(ddp_progress_ratio)")
    assert done == sorted(done)
    parts = json.loads((MONITORING / "dashboards" / "job.json").read_text())["panels"]
    (mean_step,) = (panel for panel in parts if panel["title"] == "A mean step")
    together = " + ".join(f"({target['expr']})" for target in mean_step["targets"])
    whole = "avg(rate(ddp_step_duration_seconds_sum[10s]) / (rate(ddp_steps_total[10s]) > 0))"
    ratios = watched.values(f"({together}) / {whole}")
    assert ratios
    assert all(0.9 <= ratio <= 1.3 for ratio in ratios), ratios


def test_report_of_job_is_written_from_prometheus(watched: ScrapedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_cli.features.ui.cluster_job._LEAST_STEP", 1)  # it scrapes that often here
    job = yaml.safe_load((watched.run_folder / "status.yaml").read_text())
    job["metadata"] |= {"name": "run", "namespace": "local"}  # as the configuration labels the scraped series
    del job["status"]["points"]
    run = read_job(job, ClusterData(), datetime.now(UTC), watched.prometheus.url)
    own = read_run(watched.run_folder)
    scraped = [row["loss"] for row in run.rows if "loss" in row]
    written = [row["loss"] for row in own.rows if "loss" in row]
    assert len(scraped) > 2
    assert scraped[-1] == pytest.approx(written[-1])
    (pod,) = run.pods
    page = pod.report
    assert page is not None
    assert [rank.rank for rank in page.ranks] == [0, 1]
    assert all(rank.steps for rank in page.ranks)
    assert {chart["id"] for chart in build_curves(run)["charts"]} >= {"loss", "rate"}
