from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from ddp_sdk import contract
from ddp_sdk.errors import UserError
from ddp_sdk.exporter import Exporter, read_port
from ddp_sdk.metrics_table import METRICS
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.cli import main
from ddp_trainer.distributed.world import World
from tests.support import ROOT


def values(page: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(page.decode())
    return {sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels}


def get(port: int | None, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as response:
        body: bytes = response.read()
        return body


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    endpoint = Exporter.start(port=0, env=RankEnv(rank=3, world_size=8), total_steps=10, epochs=2)
    yield endpoint
    endpoint.close()


def test_two_lines_export_metrics_of_user_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_METRICS_PORT, "0")
    exporter = Exporter.start()
    for loss in (2.0, 1.0):
        exporter.step(samples=32, loss=torch.tensor(loss, requires_grad=True))
    page = values(get(exporter.port))
    exporter.close()
    assert page["ddp_samples_total"] == 64
    assert page["ddp_steps_total"] == 2
    assert page["ddp_step"] == 2
    assert page["ddp_loss"] == 1.0
    assert page["ddp_step_duration_seconds_count"] == 2


def test_threads_page_excludes_main_and_server_threads(exporter: Exporter) -> None:
    enough = threading.Event()

    def read_ahead() -> None:
        enough.wait()

    prefetch = threading.Thread(target=read_ahead, name="prefetch \ud800")
    prefetch.start()
    text = get(exporter.port, "/threads").decode()
    enough.set()
    prefetch.join()
    own, *_ = text.partition("Thread prefetch \\ud800 (most recent call first):\n  File ")[2].partition("Thread ")
    assert re.search(r'  File ".*test_exporter\.py", line \d+ in read_ahead\n', own)
    assert "in test_threads_are_told" not in text
    assert "in serve_forever" not in text
    assert "in do_GET" not in text
    assert "read_ahead" not in get(exporter.port, "/threads").decode()


def test_page_has_series_of_table_with_rank_and_no_gauge_without_value(exporter: Exporter) -> None:
    before = values(exporter.page())
    assert before.keys().isdisjoint({"ddp_loss", "ddp_validation_accuracy_ratio"})
    assert (before["ddp_world_size"], before["ddp_planned_epochs"], before["ddp_samples_total"]) == (8, 2, 0)
    for loss in (1.0, float("nan"), float("inf")):
        exporter.step(
            samples=4, loss=loss, step=5, epoch=1, learning_rate=0.5, seconds=0.25, data_wait=0.125, compute=0.0625
        )
    exporter.heartbeat()
    with exporter.saving():
        assert values(exporter.page())["ddp_saving"] == 1
    page = values(get(exporter.port))
    expected = {
        "ddp_progress_ratio": 0.5, "ddp_step": 5, "ddp_planned_steps": 10, "ddp_epoch": 1, "ddp_learning_rate": 0.5,
        "ddp_step_duration_seconds_sum": 0.75, "ddp_data_wait_seconds_total": 0.375, "ddp_saving": 0,
        "ddp_compute_seconds_total": 0.1875, "ddp_nonfinite_losses_total": 2, "ddp_heartbeats_total": 1,
    }  # fmt: skip
    assert expected.items() <= page.items()
    assert page["ddp_last_step_timestamp_seconds"] > 1_600_000_000
    families = list(text_string_to_metric_families(exporter.page().decode()))
    assert {sample.labels["rank"] for family in families for sample in family.samples} == {"3"}
    kinds = {metric.name.removesuffix("_total"): (metric.kind, metric.help) for metric in METRICS}
    assert all(kinds[family.name] == (family.type, family.documentation) for family in families)


def test_silent_client_does_not_block_close(exporter: Exporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port or 0)):
        get(exporter.port)  # so that the previous one was read too
        closing = threading.Thread(target=exporter.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_new_connection_closes_oldest_of_too_many(exporter: Exporter) -> None:
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", exporter.port or 0)
        slow = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(40)]
        for connection in slow:
            connection.sendall(b"G")
        assert get(exporter.port)
        assert all(map(is_closed, slow[:20]))
        slow[39].sendall(b"ET /metrics HTTP/1.0\r\n\r\n")
        assert slow[39].recv(4096).startswith(b"HTTP/1.0 200 ")


def test_connection_ends_at_its_deadline_without_traceback(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddp_sdk.exporter._CONNECTION_SECONDS", 0.0)
    with socket.create_connection(("127.0.0.1", exporter.port or 0), timeout=60) as connection:
        assert is_closed(connection)
    assert capfd.readouterr().err == ""


def test_closed_exporter_is_not_kept_until_program_ends() -> None:
    before = threading.enumerate()  # another test's thread may never end
    exporter = Exporter.start(port=0, env=RankEnv())
    kept = weakref.ref(exporter)
    exporter.close()
    del exporter
    while any(thread.name == "ddp-metrics" and thread not in before for thread in threading.enumerate()):
        threading.Event().wait(0.01)
    gc.collect()
    assert kept() is None


def test_example_of_document_runs_and_shows_step_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_METRICS_PORT, "0")
    page = (ROOT / "docs" / "metrics.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n)+", page, re.MULTILINE)
    (example,) = [textwrap.dedent(block) for block in blocks if "import" in block]
    names: dict[str, Any] = {}
    exec(example, names)
    shown = values(get(names["exporter"].port))
    names["exporter"].close()
    assert shown["ddp_progress_ratio"] == 1.0
    assert shown["ddp_samples_total"] == 20 * 32
    assert shown["ddp_loss"] > 0
    assert shown["ddp_data_wait_seconds_total"] > 0
    assert 0 < shown["ddp_compute_seconds_total"] < shown["ddp_step_duration_seconds_sum"]


def test_watched_compute_time_spans_forward_to_last_gradient(
    monkeypatch: pytest.MonkeyPatch, exporter: Exporter
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    model = torch.nn.Linear(2, 1)
    exporter.watch(model)
    exporter.step(samples=1)
    now[0] += 3.0  # the wait for data
    model.eval()(torch.zeros(1, 2))  # a validation is not part of it
    model.train()
    now[0] += 4.0
    for _ in range(2):  # accumulation: two forward passes make one step
        model(torch.zeros(1, 2)).sum().backward()
        now[0] += 10.0
    now[0] += 50.0  # the wait for other ranks, the update
    exporter.step(samples=1)
    page = values(exporter.page())
    assert page["ddp_data_wait_seconds_total"] == 7.0
    assert page["ddp_compute_seconds_total"] == 10.0


@pytest.mark.parametrize(("path", "host", "code"), [("/", "localhost", 404), ("/metrics", "evil.example", 403)])
def test_other_page_and_foreign_name_are_refused(path: str, host: str, code: int, exporter: Exporter) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{exporter.port}{path}", headers={"Host": host})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    caught.value.close()  # it holds the connection
    assert caught.value.code == code


def test_local_rank_adds_its_number_to_port() -> None:
    for _ in range(20):  # another process may take the port before the exporter does
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            base = probe.getsockname()[1] - 1
        exporter = Exporter.start(port=base, env=RankEnv(rank=1, local_rank=1, world_size=2))
        exporter.close()
        if exporter.port is not None:
            break
    assert exporter.port == base + 1


def test_busy_port_warns_and_training_continues(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        exporter = Exporter.start(port=port, env=RankEnv())
        exporter.step(samples=1)
        exporter.close()
    assert exporter.port is None
    assert f"no metrics on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["abc", "-1", "65536", "9400.0", "1" * 100, "٩"])
def test_metrics_port_that_is_no_port_is_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.ENV_RUNTIME_DIR, raising=False)
    monkeypatch.setenv(contract.ENV_METRICS_PORT, port)
    with pytest.raises(
        UserError, match=r"DDP_METRICS_PORT: .* is not a port; set a number from 0 .* to 65535, or unset"
    ):
        Exporter.start(env=RankEnv())


@pytest.mark.parametrize(("port", "taken"), [("", 9400), (" 9500 ", 9500), ("0", 0)])
def test_metrics_port_is_read_from_environment(port: str, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_METRICS_PORT, port)
    assert read_port() == taken


def test_trainer_refuses_metrics_port_before_its_ranks_join(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(contract.ENV_METRICS_PORT, "abc")
    monkeypatch.setattr(World, "start", None)
    assert main(["--preset", "digits-resnet", "--device", "cpu", "--max-steps", "1"]) == contract.EXIT_USER_ERROR
    assert "DDP_METRICS_PORT: 'abc' is not a port" in capsys.readouterr().err


def test_launchers_folder_gets_port_and_last_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.ENV_RUNTIME_DIR, str(tmp_path))
    monkeypatch.setenv(contract.ENV_METRICS_PORT, "1")
    exporter = Exporter.start(env=RankEnv(rank=9, local_rank=1, world_size=10))
    port = int((tmp_path / "metrics" / "1.port").read_text())
    assert values(get(port))["ddp_world_size"] == 10
    exporter.step(samples=7)
    exporter.close()
    exporter.close()
    assert values((tmp_path / "metrics" / "1.prom").read_bytes())["ddp_samples_total"] == 7
    with pytest.raises(OSError, match="refused"):
        get(port)


def test_buckets_are_cumulative_and_include_their_edge() -> None:
    exporter = Exporter(RankEnv())
    for seconds in (0.001, 0.0011, 500.0):
        exporter.observe("ddp_step_duration_seconds", seconds)
    page = exporter.page().decode()
    assert 'ddp_step_duration_seconds_bucket{le="0.001",rank="0"} 1.0' in page
    assert 'ddp_step_duration_seconds_bucket{le="0.0025",rank="0"} 2.0' in page
    assert 'ddp_step_duration_seconds_bucket{le="120.0",rank="0"} 2.0' in page
    assert 'ddp_step_duration_seconds_bucket{le="+Inf",rank="0"} 3.0' in page
    assert 'ddp_step_duration_seconds_count{rank="0"} 3.0' in page


def test_table_has_every_metric_of_contract_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    contracted = {value for name, value in vars(contract).items() if name.startswith("METRIC_")}
    assert contracted <= set(names)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter") or metric.name == "ddp_planned_steps"


FORKED = """
import os, sys
from pathlib import Path
from ddp_sdk.exporter import Exporter

exporter = Exporter.start()
exporter.step(samples=7, loss=1.0)
child = os.fork()
if child == 0:
    exporter.step(samples=1000)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
folder = Path(os.environ["DDP_RUNTIME_DIR"], "metrics")
assert not (folder / "0.prom").exists(), "the child wrote the parent's final page"
# A child that lives on: the port is the parent's alone.
release, hold = os.pipe()
child = os.fork()
if child == 0:
    os.close(hold)
    os.read(release, 1)
    os._exit(0)
os.close(release)
exporter.close()
import socket
with socket.socket() as probe:
    probe.bind(("127.0.0.1", exporter.port))
os.close(hold)
os.waitpid(child, 0)
"""


def test_forked_child_keeps_parent_port_final_page_and_exit(tmp_path: Path) -> None:
    environ = os.environ | {contract.ENV_RUNTIME_DIR: str(tmp_path)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    subprocess.run(command, env=environ, check=True, timeout=120)
    assert values((tmp_path / "metrics" / "0.prom").read_bytes())["ddp_samples_total"] == 7
