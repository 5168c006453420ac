"""The commands for a cluster, without a cluster: tables, screens, lines of logs, drills, completion."""

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import argcomplete
import pytest
import yaml

from ddp_cli.client.client import Client
from ddp_cli.commands import main, probe, usage
from ddp_cli.commands.drill import DrillResult, RunEnded, drill, print_result
from ddp_cli.commands.io import CommandError
from ddp_cli.commands.list_jobs import format_table
from ddp_cli.commands.recovery import MeasuredRecovery, Sample
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
    "progress": {"epoch": 2, "epochs": 5, "step": 40, "percent": "40.0%", "eta": "1m00s", "etaSeconds": 60},
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


class FakeTarget:
    """A job with given samples, up to its last phase; ``killed`` is the rank that was killed."""

    summary = "its summary above"

    def __init__(self, *samples: Sample, end: str = "") -> None:
        self._samples = samples
        self._end = end
        self.killed: int | None = None

    def samples(self) -> Iterator[Sample]:
        yield from self._samples
        if self._end:
            raise RunEnded(self._end)

    def check_rank(self, rank: int) -> None:
        """Accept every rank."""

    def kill(self, rank: int) -> str:
        self.killed = rank
        return f"rank {rank}"


class TestDrill:
    def test_drill_waits_for_steps_kills_and_measures(self) -> None:
        early = Sample(1, 1, 1, 1, 0)
        ready = Sample(2, 1, 5, 5, 0)
        back = Sample(9, 1, 5, 1, 1)
        target = FakeTarget(early, ready, back)
        rank, result = drill(target, 1, after=3, timeout=60, clock=lambda: 3.0)
        assert (rank, target.killed, result.seconds, result.steps_lost) == ("rank 1", 1, 6.0, 1)

    @pytest.mark.parametrize(
        ("samples", "end", "message"),
        [
            ([Sample(1, 1, 0, 0, 0), Sample(500, 1, 0, 0, 0)], "", "has not completed 3 steps"),
            ([Sample(1, 1, 2, 2, 0)], "Succeeded", r"succeeded before rank 0 completed 3 steps, .*--after"),
            ([Sample(1, 1, 2, 2, 0)], "Failed", r"ended \(Failed\) before the kill; see its summary above"),
            (
                [Sample(2, 1, 5, 5, 0), Sample(100, 1, 5, 1, 1)],
                "",
                "killed rank 0; training did not resume within 60 s",
            ),
            ([Sample(2, 1, 5, 5, 0)], "Succeeded", "killed rank 0; the job succeeded before it reported a step"),
            ([Sample(2, 1, 5, 5, 0)], "Failed", r"killed rank 0; the job did not recover and ended \(Failed\)"),
        ],
    )
    def test_drill_without_result_names_reason_and_remedy(self, samples: list[Sample], end: str, message: str) -> None:
        target = FakeTarget(*samples, end=end)
        with pytest.raises(CommandError, match=message):
            drill(target, 0, after=3, timeout=60, clock=lambda: 3.0)
        assert (target.killed is None) is ("killed" not in message)

    def test_job_without_checkpoints_has_lost_all_steps(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A script that logs every 20th step: the new process reports step 20 first, as the killed one did."""
        target = FakeTarget(
            Sample(1, 1, 20, 1, 0, interval=20),
            Sample(2, 1, 560, 541, 0, interval=20),
            Sample(9, 1, 20, 1, 1, interval=20),
        )
        result = drill(target, 1, after=500, timeout=60, clock=lambda: 3.0)
        print_result(result, "text")
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == "steps lost  all 560 (at step 560, restarted at step 0)"
        assert lines[3].startswith("verdict     restarted at step 0: no checkpoint was loaded.")

    def test_steps_from_log_are_lost_within_its_interval(self, capsys: pytest.CaptureFixture[str]) -> None:
        measured_recovery = MeasuredRecovery(1.0, "process", 240, 219, began_at=19, interval=20)
        print_result(DrillResult("rank 1", measured_recovery), "text")
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == (
            "steps lost  at most 40 (at step 240, resumed between 200 and 220: the log has every 20th step)"
        )
        assert lines[3] == "verdict     recovered"


class TestProbe:
    def test_process_of_rank_is_found_by_its_record(self, tmp_path: Path) -> None:
        """A DataLoader worker inherits the environment, and of a forked rank no other process sees RANK."""
        inner = "import time; time.sleep(600)"
        code = (
            f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}]); print(p.pid, flush=True)"
        )
        worker = [sys.executable, "-c", f"{code}; p.wait()"]
        env = os.environ | {"DDP_RUNTIME_DIR": str(tmp_path)}
        (tmp_path / "workers").mkdir()
        with subprocess.Popen(worker, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            assert probe.find_worker(7) == 0
            for local_rank, pid in enumerate((1 << 22, process.pid), 6):
                about = {"pid": pid, "rank": local_rank, "localRank": local_rank}
                (tmp_path / "workers" / f"{local_rank}.json").write_text(json.dumps(about))
            try:
                assert probe.find_worker(7, str(tmp_path)) == probe.find_worker(7, str(tmp_path.parent)) == process.pid
                assert probe.find_worker(7, f"{tmp_path}-2") == 0
                assert probe.find_worker(8, str(tmp_path)) == 0
                assert probe.kill(7) == process.pid
                assert process.wait(300) == -9
            finally:
                process.kill()
                os.kill(child, 9)

    def test_probe_is_one_file_of_standard_library(self) -> None:
        from ddp_cli.commands.drill import build_probe_command

        line = build_probe_command("kill", "123456")
        line[0] = sys.executable
        done = subprocess.run([line[0], "-I", *line[1:]], capture_output=True, text=True, timeout=300)
        assert (json.loads(done.stdout), done.stderr) == ({"killed": 0}, "")


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
