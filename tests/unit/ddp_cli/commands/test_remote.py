"""The commands for a cluster, without a cluster: tables, screens, lines of logs, completion."""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import argcomplete
import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.client.client import Client
from ddp_cli.commands import usage
from ddp_cli.commands.list_jobs import format_table
from ddp_cli.commands.watch import JsonScreen, PlainScreen, rows_of
from ddp_cli.view.display import build_table
from ddp_operator.api.constants import KUEUE_QUEUE_LABEL
from ddp_operator.api.kubeobjects import format_time
from tests.support.builders import NOW
from tests.support.fake_backend import FakeBackend


def job(name: str = "x", *, version: str = "1", **status: Any) -> dict[str, Any]:
    created = format_time(NOW - timedelta(minutes=5))
    metadata = {"name": name, "namespace": "ml", "resourceVersion": version, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"nodes": 2}, "status": status}


RUNNING = {
    "phase": "Running",
    "attempt": 1,
    "nodes": {"desired": 2, "ready": 2, "succeeded": 0, "failed": 0},
    "progress": {"epoch": 2, "epochs": 5, "step": 40, "percent": "40.0%", "eta": "1m00s"},
}
DONE = {"phase": "Succeeded", "nodes": {"desired": 2, "succeeded": 2}, "restarts": {"all": 3}}


@pytest.mark.parametrize(
    "content", [b"a: [\n", b"- 1\n", b"\x95\xff", b"", b"a: 1\n", b"current-context: a\ncontexts: 7\n"]
)
def test_malformed_kubeconfig_is_user_error(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config"
    path.write_bytes(content)
    assert main(["list", "--kubeconfig", str(path)]) == 2
    assert capsys.readouterr().err.startswith("ddp list: the kubeconfig ")


class TestList:
    def test_columns_are_those_of_kubectl(self) -> None:
        head, row = format_table([job(**RUNNING)], NOW)
        assert head.split() == [
            *("NAME", "PHASE", "REASON", "NODES", "PROGRESS", "ETA", "THROUGHPUT", "LOSS", "RESTARTS", "AGE")
        ]
        assert row.split() == ["x", "Running", "-", "2", "40.0%", "1m00s", "-", "-", "-", "5m00s"]


class TestUsage:
    @staticmethod
    def used(name: str, namespace: str, productive: int, lost: dict[str, int]) -> dict[str, Any]:
        spent = [{"cause": cause, "gpuSeconds": seconds} for cause, seconds in lost.items()]
        total = productive + sum(lost.values())
        usage = {"gpus": 0, "since": format_time(NOW), "gpuSeconds": total, "productive": productive, "waiting": 0}
        return {"metadata": {"name": name, "namespace": namespace}, "status": {"usage": usage | {"lost": spent}}}

    @staticmethod
    def answer(monkeypatch: pytest.MonkeyPatch, jobs: list[Any]) -> None:
        backend = argparse.Namespace(list=lambda everywhere: {"items": jobs})
        monkeypatch.setattr(usage, "is_local", lambda arguments: False)
        monkeypatch.setattr(usage, "open_client", lambda arguments, local: argparse.Namespace(backend=backend))

    def test_sums_by_job_and_by_namespace(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        jobs = [self.used("a", "x", 7200, {}), self.used("b", "x", 1800, {"OOM": 1500, "Stalled": 300}), job("none")]
        self.answer(monkeypatch, jobs)
        assert main(["usage"]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert rows[1] == ["a", "2.0", "100.0%", "0.0%", "0.0%", "-"]
        assert rows[2] == ["b", "1.0", "50.0%", "0.0%", "50.0%", "OOM", "0.4", "h,", "Stalled", "0.1", "h"]
        assert rows[3][:2] == ["total", "3.0"]
        assert main(["usage", "-A", "-o", "json"]) == 0
        sums = {"Productive": 9000, "Waiting": 0, "OOM": 1500, "Stalled": 300}
        assert json.loads(capsys.readouterr().out) == {"x": sums}
        jobs[0]["status"]["profile"] = {"kind": "DDPTrainingProfile", "name": "h100", "digest": "d", "job": {}}
        assert main(["usage", "-A", "--by-profile", "-o", "json"]) == 0
        by_profile = json.loads(capsys.readouterr().out)
        assert by_profile == {"h100": {"Productive": 7200, "Waiting": 0}, "-": sums | {"Productive": 1800}}


class TestScreens:
    def test_plain_lines_have_name_and_are_printed_on_change(self) -> None:
        stream = io.StringIO()
        screen = PlainScreen(stream)
        for _ in range(3):
            screen.show({("ml", "x"): job(**RUNNING)})
        screen.show({})
        first, last = stream.getvalue().splitlines()
        assert first.partition(" ")[2] == "x: Running  epoch 2/5  step 40  40.0%  ETA 1m00s"
        assert last == "x: deleted"

    def test_json_has_line_for_each_change(self) -> None:
        stream = io.StringIO()
        screen = JsonScreen(stream)
        for version in ("1", "1", "2"):
            screen.show({("ml", "x"): job(version=version, **RUNNING)})
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [line["metadata"]["resourceVersion"] for line in lines] == ["1", "2"]

    def test_table_has_bar_and_figures(self) -> None:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=140, force_terminal=False)
        console.print(build_table(rows_of({("ml", "x"): job(**RUNNING), ("ml", "y"): job("y", **DONE)})))
        assert isinstance(console.file, io.StringIO)
        head, first, second = console.file.getvalue().splitlines()
        assert head.split() == ["NAME", "PHASE", "REASON", "NODES", "RESTARTS", "PROGRESS"]
        assert "Running" in first
        assert "2/2" in first
        assert "40.0%" in first
        assert "epoch 2/5" in first
        assert second.split()[:4] == ["y", "Succeeded", "2/2", "3"]
        assert "100.0%" in second


class TestCompletion:
    @pytest.fixture
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A folder of runs, on a machine without a cluster."""
        for variable in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        for name in ("mnist", "mnist-large", "resnet"):
            folder = tmp_path / "ddp-runs" / name
            folder.mkdir(parents=True)
            status = {"metadata": {"name": name}, "spec": {}, "status": {"phase": "Succeeded"}}
            (folder / "status.yaml").write_text(yaml.safe_dump(status))
        return tmp_path

    @pytest.mark.parametrize(
        ("line", "candidates"),
        [
            ("ddp su", {"submit", "suspend"}),
            ("ddp logs --fo", {"--follow"}),
            ("ddp why mn", {"mnist", "mnist-large"}),
            ("ddp logs --local --runs-dir ddp-runs mnist-", {"mnist-large"}),
            ("ddp run res", {"res.yaml"}),
            ("ddp unknown --n", set()),
        ],
    )
    def test_words_are_completed_in_bash(self, line: str, candidates: set[str], runs: Path) -> None:
        (runs / "ddp").write_text(f'#!/bin/sh\nexec {sys.executable} -m ddp_cli "$@"\n')
        (runs / "ddp").chmod(0o755)
        (runs / "res.yaml").touch()
        words = line.split()
        code = (
            f"{argcomplete.shellcode(['ddp'])}\nCOMP_LINE='{line}'; COMP_POINT={len(line)}; COMP_TYPE=63; "
            f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            f"_python_argcomplete ddp '{words[-1]}' '{words[-2]}'; echo ${{COMPREPLY[@]}}"
        )
        environment = os.environ | {"PATH": f"{runs}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=runs, env=environment)
        assert set(done.stdout.split()) == candidates, done.stderr

    def test_names_are_not_awaited_from_a_silent_cluster(self, runs: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            context = {"name": "c", "context": {"cluster": "c", "user": "c"}}
            cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
            config = {
                "contexts": [context],
                "clusters": [cluster],
                "users": [{"name": "c", "user": {}}],
                "current-context": "c",
            }
            (runs / "config").write_text(yaml.safe_dump(config))
            query = {"_ARGCOMPLETE": "1", "COMP_LINE": "ddp why m", "COMP_POINT": "9"}
            query |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(runs / "candidates"), "KUBECONFIG": str(runs / "config")}
            done = subprocess.run([sys.executable, "-m", "ddp_cli"], env=os.environ | query, capture_output=True)
        assert (done.returncode, done.stdout, (runs / "candidates").read_text()) == (0, b"", "")

    def test_removed_command_names_its_replacement(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["completion", "bash"]) == 2
        assert 'eval "$(register-python-argcomplete ddp)"' in capsys.readouterr().err

    def test_plugin_of_kubectl_shows_its_own_usage(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["/usr/local/bin/kubectl-ddp"])
        with pytest.raises(SystemExit):
            main(["why", "--help"])
        assert "usage: kubectl ddp why" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("labels", "more"),
    [
        ({}, ""),
        ({KUEUE_QUEUE_LABEL: "q"}, "; new pods may wait for admission to the queue: ddp why x"),
    ],
)
def test_scale_of_queued_job_mentions_admission(
    labels: dict[str, str], more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = job() | {"spec": {"nodes": 1}}
    result["metadata"]["labels"] = labels
    monkeypatch.setattr(Client, "backend", FakeBackend(result))
    assert main(["scale", "x", "2"]) == 0
    assert capsys.readouterr().out == f"x: scaled from 1 to 2 nodes{more}\n"
    assert main(["scale", "x", "2"]) == 0
    assert capsys.readouterr().out == "x: unchanged\n"
