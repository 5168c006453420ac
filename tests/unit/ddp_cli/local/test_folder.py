"""The records of a run: files of the run folder, samples of the reports, the tail of a log."""

from __future__ import annotations

import csv
import json
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.files import Selection
from ddp_cli.client.runs import list_runs, open_run
from ddp_cli.commands.io import ExitCode
from ddp_cli.local import folder as folder_module
from ddp_cli.local.folder import COLUMNS, RunFolder, choose_rate, replace_file
from ddp_cli.local.recorder import RunRecorder
from ddp_cli.local.screen import Tail, find_logs
from ddp_cli.local.store import Store
from ddp_operator.decide.pace import STALLED, Rates
from ddp_operator.decide.report import Page
from ddp_pod.contract.progress import RankProgress
from tests.support.builders import page, respond

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "x", NOW)


def test_run_folder_and_files_with_secrets_are_readable_by_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = RunFolder.create(tmp_path / "ddp-runs", "x", NOW)
        folder.write_manifest("kind: Secret", [], {}, "ddp run job.yaml")
        folder.write_status({"kind": "K", "metadata": {}})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.path, *folder.path.iterdir())}
    assert modes[folder.path.name] == 0o700
    assert {name: modes[name] for name in ("job.yaml", "objects.yaml", "status.yaml")} == dict.fromkeys(
        ("job.yaml", "objects.yaml", "status.yaml"), 0o600
    )


def test_status_file_is_readable_yaml_and_replaced_atomically(folder: RunFolder) -> None:
    for phase in ("Running", "Failed"):
        folder.write_status({"kind": "K", "metadata": {}, "status": {"phase": phase, "traceback": "a\nb\n"}})
    text = folder.status.read_text()
    assert yaml.safe_load(text)["status"] == {"phase": "Failed", "traceback": "a\nb\n"}
    assert "traceback: |" in text
    assert not list(folder.path.glob("*.tmp"))


PLANTED = ("status.yaml", "metrics.csv", "summary.txt", "changes.json", "reports/attempt-1-pod-0.json", "job.yaml")


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("kind", ["link", "link to folder", "pipe"])
def test_planted_file_is_neither_read_nor_followed_nor_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    folder = RunFolder(tmp_path / "runs" / "x-1")
    folder.reports.mkdir(parents=True)
    folder.status.write_text("kind: K\nmetadata: {name: x}\nspec: {}\n")
    place = folder.path / name
    place.unlink(missing_ok=True)
    if kind == "link to folder" and place.parent != folder.path:
        place.parent.rmdir()
        place.parent.symlink_to(secret)
        (secret / place.name).write_text('{"version": 2, "stepHint": "secret"}')
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        (secret / "key").write_text("secret")
        place.symlink_to(secret / "key")
    before = {path: path.read_bytes() for path in secret.iterdir()}
    for command in (
        ["list", "--local"],
        ["why", "x", "--local"],
        ["logs", "x", "--local"],
        ["suspend", "x", "--local"],
    ):
        main([*command, "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(OSError):  # noqa: PT011
        folder.read(place)
    assert not folder.in_use
    assert {path: path.read_bytes() for path in secret.iterdir()} == before


BOMB = "".join(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30))
HEAD = "kind: K\nmetadata: {name: x}\nspec: {}\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}a0: &a0 [x]\n{BOMB}",
        f"{HEAD}x: {'[' * 2_000_000}",
        f"{HEAD}x: !!python/object/apply:os.abort []\n",
        f"{HEAD}status: [1]\n",
        f"{HEAD}status: {{phase: Running, conditions: [1]}}\n",
        f"{HEAD}status: {{usage: {{gpuSeconds: x}}}}\n",
        "- 1\n",
        "\0" * 1000,
    ],
    ids=range(8),
)
def test_planted_status_ends_no_command(text: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "x-1")
    folder.path.mkdir(parents=True)
    folder.status.write_text(text)
    for command in (["list"], ["list", "-o", "json"], ["usage"], ["why", "x"], ["logs", "x"]):
        code = main([*command, "--local", "--runs-dir", str(tmp_path / "runs")])
        assert code in (0, ExitCode.BAD_INPUT, ExitCode.NOT_FOUND)  # of a run without logs


def test_damaged_files_are_read_as_far_as_possible(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "x-1")
    folder.path.mkdir(parents=True)
    folder.status.write_text(HEAD)
    folder.metrics.write_text(f"time,step\n1,2\n3,{'9' * 200_000}\n")
    folder.environment.write_text("[" * 100_000)
    assert folder.read_rows() == [{"time": 1.0, "step": 2.0}]
    assert folder.facts == {}


@pytest.mark.parametrize("runs", ["runs", "."])
def test_next_submit_packs_no_run_and_no_report(runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    folder = RunFolder.create(Path(runs), "x", NOW)
    folder.status.write_text(HEAD)
    folder.write(folder.report, "<html>")
    assert [path for path, _ in Selection(tmp_path).walk()] == ["train.py"]


def test_run_folder_of_another_user_or_behind_a_link_is_not_listed(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    (real / "status.yaml").write_text("kind: K\nmetadata: {name: x}\nspec: {}\n")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "linked-1").symlink_to(real)
    assert list_runs(runs)["items"] == []
    with pytest.raises(ClientError, match="no link to one"):
        open_run("linked-1", runs)
    if os.geteuid() == 0:
        (runs / "other-1").mkdir()
        (runs / "other-1" / "status.yaml").write_text("kind: K\nmetadata: {name: x}\nspec: {}\n")
        os.chown(runs / "other-1", 12345, 12345)
        assert list_runs(runs)["items"] == []
        with pytest.raises(ClientError, match="belongs to another user"):
            open_run("other-1", runs)


def test_linked_folder_of_runs_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(tmp_path / "elsewhere", "x", NOW)
    run.status.write_text(HEAD)
    Path("ddp-runs").symlink_to("elsewhere")
    for words in (["list"], ["why"], ["logs", run.path.name], ["delete", "x"]):
        assert main([*words, "--local"]) == ExitCode.BAD_INPUT
        assert "ddp-runs: this folder of runs is a link; name its target with --runs-dir" in capsys.readouterr().err
    with pytest.raises(NotADirectoryError):
        RunFolder.create(Path("ddp-runs"), "x", NOW)
    assert main(["list", "--local", "--runs-dir", "elsewhere"]) == ExitCode.OK


def test_list_of_many_runs_ends_with_number_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for second in range(5):
        run = RunFolder.create(tmp_path, "x", NOW + timedelta(seconds=second))
        run.status.write_text(HEAD)
        os.utime(run.status, (second, second))
    now = iter(range(100))
    monkeypatch.setattr("ddp_cli.client.runs.time.monotonic", lambda: 5.0 * next(now))
    assert main(["list", "--local", "--runs-dir", str(tmp_path)]) == ExitCode.OK
    shown = capsys.readouterr()
    assert (len(shown.out.splitlines()), run.path.name in shown.out) == (2, True)
    assert shown.err == "and 4 more\n"


def test_planted_temporary_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (tmp_path / "changes.json.tmp").symlink_to(target)
    replace_file(tmp_path / "changes.json", "{}")
    assert target.read_text() == "mine"
    assert (tmp_path / "changes.json").read_text() == "{}"


def test_metrics_of_a_long_run_stay_bounded(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_cli.local.folder.MOST_ROWS", 50)
    for step in range(1000):
        loss = 99.0 if step == 500 else float(step % 7)
        moment = datetime.fromtimestamp(1000.0 + step, UTC)
        folder.write_row(moment, 1, Page(ranks=(RankProgress(step=step, steps=step, loss=loss),)))
    rows = folder.read_rows()
    assert 20 < len(rows) <= 102
    assert (rows[0]["step"], rows[-1]["step"], max(row["loss"] for row in rows)) == (0.0, 999.0, 99.0)


def test_metrics_rows_omit_unknown_values(folder: RunFolder) -> None:
    folder.write_row(NOW, 1, Page(ranks=(RankProgress(step=5.0, loss=0.5),)))
    folder.write_row(NOW, 2, Page(ranks=(RankProgress(step=6.0, val_accuracy=0.9),)), Rates(steps=4.0))
    with folder.metrics.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == list(COLUMNS)
    assert (rows[0]["step"], rows[0]["loss"], rows[0]["validation_accuracy"]) == ("5.0", "0.5", "")
    assert folder.read_rows()[1]["validation_accuracy"] == 0.9
    assert "loss" not in folder.read_rows()[1]
    assert (rows[0]["steps_per_second"], rows[1]["steps_per_second"], rows[1]["samples_per_second"]) == ("", "4.0", "")


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        (Rates(steps=4.0), ("steps_per_second", "steps/s")),
        (Rates(steps=4.0, samples=256.0), ("samples_per_second", "samples/s")),
    ],
)
def test_throughput_of_run_is_in_steps_where_no_samples_are_reported(
    folder: RunFolder, rates: Rates, chosen: tuple[str, str]
) -> None:
    folder.write_row(NOW, 1, Page(ranks=(RankProgress(step=1.0),)))
    folder.write_row(NOW, 1, Page(ranks=(RankProgress(step=5.0),)), rates)
    folder.write_row(NOW, 1, Page(ranks=(RankProgress(step=5.0, samples_per_second=7.0),)), STALLED)
    rows = folder.read_rows()
    assert choose_rate(rows) == chosen
    assert (rows[-1]["samples_per_second"], rows[-1]["steps_per_second"]) == (0.0, 0.0), "a chart shows the stall"


def test_failed_write_is_reported_once_and_retried(folder: RunFolder) -> None:
    messages: list[str] = []
    folder.on_problem = messages.append
    for path in (folder.status, folder.events, folder.metrics, folder.reports / "p.json", folder.summary):
        path.mkdir()  # like a full disk, and also for root
    for _ in range(2):
        assert not folder.write_status({"kind": "K", "metadata": {}})
        folder.write_event(NOW, "Warning", "Failed", "x")
        folder.write_row(NOW, 1, Page())
        folder.write(folder.reports / "p.json", "x")
        folder.write(folder.summary, "x")
    assert len(messages) == 1
    assert messages[0].startswith(f"{folder.status} cannot be written (Is a directory)")
    folder.status.rmdir()
    assert folder.write_status({"kind": "K", "metadata": {}})
    assert folder.status.exists()
    assert not list(folder.path.rglob("*.tmp"))


# --- recorder ---------------------------------------------------------------------------------------------------------


class FakeKubelet:
    def port_of(self, pod: Any) -> int:
        return 1234


class ServingCluster:
    """Two running pods, and the pages that they serve."""

    def __init__(self) -> None:
        self.store = Store(lambda: NOW)
        self.kubelet = FakeKubelet()
        self.pages: dict[str, str | None] = {}
        for index in ("0", "1"):
            annotations = {"batch.kubernetes.io/job-completion-index": index}
            metadata = {"name": f"p{index}", "annotations": annotations, "labels": {"ddp-operator.dev/attempt": "2"}}
            self.store.add({"kind": "Pod", "metadata": metadata, "spec": {}, "status": {"phase": "Running"}})

    async def read_report(self, pod: Any, port: int) -> bytes | None:
        return respond(self.pages.get(pod["metadata"]["name"]))


def recorder(cluster: ServingCluster, folder: RunFolder) -> RunRecorder:
    return RunRecorder(cluster, folder, lambda: NOW)  # type: ignore[arg-type]


async def test_sample_keeps_page_and_adds_row_only_when_something_is_new(folder: RunFolder) -> None:
    cluster = ServingCluster()
    watching = recorder(cluster, folder)
    cluster.pages = {"p0": page(step=3, loss=0.5), "p1": page()}
    await watching.sample(everyone=True)
    await watching.sample(everyone=False)
    cluster.pages["p0"] = page(step=4, loss=0.4)
    await watching.sample(everyone=False)
    assert [(row["attempt"], row["step"], row["loss"]) for row in folder.read_rows()] == [
        (2, 3, 0.5),
        (2, 4, 0.4),
    ]
    assert watching.port == 1234
    assert (folder.reports / "attempt-2-pod-0.json").read_text() == cluster.pages["p0"]
    assert (folder.reports / "attempt-2-pod-1.json").read_text() == page()


async def test_page_with_rank_metrics_is_kept_after_ranks_end(folder: RunFolder) -> None:
    cluster = ServingCluster()
    watching = recorder(cluster, folder)
    pages = [page(), page(step=3), page(step=4), page(phase="Done")]
    kept = []
    for cluster.pages["p0"] in pages:
        await watching.sample(everyone=True)
        kept.append((folder.reports / "attempt-2-pod-0.json").read_text())
    assert kept == [*pages[:3], pages[2]]


async def test_rows_have_throughput_of_script_that_reports_only_counters(folder: RunFolder) -> None:
    cluster = ServingCluster()
    moments = iter(range(100))
    watching = RunRecorder(cluster, folder, lambda: NOW + timedelta(seconds=next(moments)))  # type: ignore[arg-type]
    for steps in (1, 2, 4):
        numbers = {"steps": steps, "step_seconds": steps / 8, "samples": steps * 32, "world_size": 2}
        cluster.pages = {"p0": page(**numbers)}
        await watching.sample(everyone=False)
    rows = [(row["steps_per_second"], row["samples_per_second"]) for row in folder.read_rows()]
    assert rows == [(8, 512)] * 3
    message = json.dumps({"version": 2, "progress": {"steps": 5, "samples": 160, "stepSeconds": 2.5}})
    watching.record_end(end(cluster, "p0", message))
    assert folder.read_rows()[-1]["steps_per_second"] == pytest.approx(4 / 2.375)


async def test_no_row_before_first_step_or_without_page(folder: RunFolder) -> None:
    cluster = ServingCluster()
    cluster.pages = {"p0": page(phase="Starting"), "p1": None}
    await recorder(cluster, folder).sample(everyone=True)
    assert not folder.metrics.exists()


@pytest.mark.parametrize(
    "message", ["", "no json", "[]", '{"version": 2, "progress": 3}', '{"version": 2, "progress": {"step": "x"}}']
)
def test_empty_last_message_adds_nothing(folder: RunFolder, message: str) -> None:
    cluster = ServingCluster()
    recorder(cluster, folder).record_end(end(cluster, "p0", message))
    assert not folder.metrics.exists()


def test_last_values_are_read_from_termination_message_of_pod_0(folder: RunFolder) -> None:
    cluster = ServingCluster()
    seen = recorder(cluster, folder)
    seen.record_end(end(cluster, "p0", json.dumps({"version": 2, "progress": {"step": 9, "loss": 0.1}})))
    seen.record_end(end(cluster, "p1", json.dumps({"version": 2, "progress": {"step": 8, "loss": 0.2}})))
    assert [(row["step"], row["loss"]) for row in folder.read_rows()] == [(9, 0.1)]


def end(cluster: ServingCluster, name: str, message: str) -> Any:
    pod = cluster.store.get("Pod", "default", name)
    assert pod is not None
    state = {"terminated": {"exitCode": 0, "message": message}}
    return {**pod, "status": {"phase": "Succeeded", "containerStatuses": [{"state": state}]}}


# --- tail -------------------------------------------------------------------------------------------------------------


def test_bar_that_redraws_itself_is_line_now_and_then(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    tail = Tail(lambda: find_logs(folder.logs), lambda file, line: lines.append(line))
    (folder.logs / "attempt-1-pod-0.log").write_text("  0%|   |\r 10%|#  |")
    tail.read()
    assert lines == []
    monkeypatch.setattr("ddp_cli.local.screen._BAR_SECONDS", 0.0)
    tail.read()
    assert lines == ["  0%|   |\r 10%|#  |"]


def test_tail_hands_on_complete_lines_of_every_attempt_and_pod(folder: RunFolder) -> None:
    lines: list[tuple[int, int, str]] = []
    tail = Tail(lambda: find_logs(folder.logs), lambda file, line: lines.append((file.attempt, file.node, line)))
    tail.read()
    first, second = (folder.logs / f"attempt-{attempt}-pod-0.log" for attempt in (2, 10))
    with first.open("a") as stream:
        for text in ("a\nb", "c\n"):
            stream.write(text)
            stream.flush()
            tail.read()
    second.write_text("new\nhalf")
    (folder.logs / "other.log").write_text("no pod's\n")
    with first.open("a") as stream:
        stream.write("late\n")
    tail.read()
    assert lines == [(2, 0, "a"), (2, 0, "bc"), (2, 0, "late"), (10, 0, "new")]


def test_changes_of_concurrent_processes_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    replace = folder_module.replace_file

    def replace_slowly(path: Path, text: str) -> None:
        time.sleep(0.02)  # after the others' changes were read
        replace(path, text)

    monkeypatch.setattr(folder_module, "replace_file", replace_slowly)
    threads = [threading.Thread(target=folder.add_changes, args=({f"field{n}": n},)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.read_changes() == {f"field{n}": n for n in range(8)}


def test_text_with_undecodable_bytes_is_written_as_these_bytes(tmp_path: Path) -> None:
    """As names of files and arguments have them in a locale without UTF-8."""
    replace_file(tmp_path / "facts", "größe".encode().decode("ascii", "surrogateescape"))
    assert (tmp_path / "facts").read_text(encoding="utf-8") == "größe"
