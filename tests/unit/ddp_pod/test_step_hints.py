"""The hint for a script whose steps are invisible: when it is due, its reason, and the pattern that it suggests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.base.pod import WorkerRecord
from ddp_pod.progress import step_hints
from ddp_pod.progress.log_reader import keep_reading
from ddp_pod.progress.step_hints import StepHint
from ddp_pod.rank.counters import RankCounters
from ddp_pod.supervise.supervisor import Supervisor
from tests.support.launcher_config import launcher_pod

PYTHON = WorkerRecord(pid=10, rank=0, local_rank=0, restart=0, world_size=2, kind="script")
SHELL = PYTHON._replace(kind="program")


def counters(*, is_counted: bool = False, is_recorded: bool = False, steps: int = 0) -> RankCounters:
    return RankCounters(
        10, 0, 2, is_counted, is_recorded, steps, 0.0, 0.0, 0.0, None, None, None, None, None
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(step_hints.time, "monotonic", lambda: now[0])
    return now


def build_late(hint: StepHint, clock: list[float], worker: WorkerRecord, found: RankCounters | None) -> str:
    assert not hint.build(worker, found)
    clock[0] += 61
    return hint.build(worker, found)


@pytest.mark.parametrize(
    ("worker", "found", "reason"),
    [
        (SHELL, counters(), "rank 0 is no Python program, and has started none that imports torch.optim"),
        (SHELL, counters(is_counted=True), "no optimizer of the Python processes that rank 0 has started has stepped"),
        (PYTHON, None, "metrics.autoInstrument is false"),
        (PYTHON, counters(), "the script has not imported torch.optim"),
        (PYTHON, counters(is_recorded=True), "recorded as a CUDA graph"),
        (PYTHON, counters(is_counted=True), "no optimizer of rank 0's own process has stepped"),
    ],
)
def test_hint_has_the_reason_and_comes_once(
    tmp_path: Path, clock: list[float], worker: WorkerRecord, found: RankCounters | None, reason: str
) -> None:
    hint = StepHint(launcher_pod(tmp_path), 0)
    assert reason in build_late(hint, clock, worker, found)
    assert not hint.build(worker, found)


def test_counted_steps_and_own_pages_give_no_hint(tmp_path: Path, clock: list[float]) -> None:
    pod = launcher_pod(tmp_path)
    assert not build_late(StepHint(pod, 0), clock, PYTHON, counters(is_counted=True, steps=1))
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0.port").write_text("1")
    assert not build_late(StepHint(pod, 0), clock, PYTHON, counters())


@pytest.mark.parametrize(
    ("lines", "following", "step"),
    [
        (["step 10/200 | loss: 0.5", "step 20/200 | loss: 0.4"], "step 30/200 | loss: 0.3", "30"),
        (["seed 3", "iteration: 7 took 12ms", "iteration: 8 took 11ms"], "iteration: 9 took 10ms", "9"),
        (["[batch 1] a", "[batch 2] b"], "[batch 3] c", "3"),
        (["{'step': 3, 'loss': 1.0}", "{'step': 4, 'loss': 0.9}"], "{'step': 5, 'loss': 0.8}", "5"),
    ],
)
def test_suggested_pattern_matches_the_next_line(
    tmp_path: Path, clock: list[float], lines: list[str], following: str, step: str
) -> None:
    hint = StepHint(launcher_pod(tmp_path), 0)
    hint.feed(("\n".join(lines) + "\n").encode())
    match = re.search(hint.suggest_pattern(), following)
    assert match is not None
    assert match["step"] == step
    assert hint.suggest_pattern() in build_late(hint, clock, SHELL, None)


def list_lines(text: str) -> list[str]:
    return [text.format(epoch=epoch, step=step, run=5 * epoch + step) for epoch in range(3) for step in range(5)]


@pytest.mark.parametrize(
    ("text", "group", "value"),
    [
        ("epoch {epoch} step {step} loss 0.1", "epoch", "2"),  # the step starts again
        ("epoch {epoch} batch {step}/5 global {run} loss 0.1", "step", "14"),
        ("Epoch {epoch}/3 done", "epoch", "2"),
    ],
)
def test_pattern_is_tried_on_the_lines_so_far(tmp_path: Path, text: str, group: str, value: str) -> None:
    hint = StepHint(launcher_pod(tmp_path), 0)
    lines = list_lines(text)
    hint.feed(("\n".join(lines) + "\n").encode())
    match = re.search(hint.suggest_pattern(), lines[-1])
    assert match is not None
    assert match.groupdict()[group] == value


@pytest.mark.parametrize(
    "lines",
    [
        ["working", "still working", "...."],
        ["frame #3: <unknown function> + 0x163b752 (0x7f98 in /lib/a.so)", "frame #4: __libc_start_main + 0x85 (0x7f)"],
        ["#0  0x00007f c10d::TCPStore () from a.so", "#1  main () at a.cc:5"],
        ["    @     0x7f98f5a4524a  42 (unknown)", "    @     0x7f98f5a45305  43 main"],
        ["[W1127 21:00:20 TCPStore.cpp:340] try 1", "[W1127 21:00:21 TCPStore.cpp:340] try 2"],
        ['  File "train.py", line 3, in f', '  File "train.py", line 9, in g'],
        ["train.py:3: UserWarning: slow 4", "train.py:9: UserWarning: slow 5"],
        ["\tat Main.run(Main.java:3)", "\tat Main.run(Main.java:5)"],
    ],
)
def test_lines_without_a_growing_number_suggest_the_exporter(
    tmp_path: Path, clock: list[float], lines: list[str]
) -> None:
    hint = StepHint(launcher_pod(tmp_path), 0)
    hint.feed(("\n".join(lines) + "\n").encode())
    assert "exporter.step(samples=" in build_late(hint, clock, SHELL, None)


def test_hint_is_in_the_report_until_a_rank_shows_progress(tmp_path: Path, clock: list[float]) -> None:
    pod = launcher_pod(tmp_path)
    hint = build_late(StepHint(pod, 0), clock, SHELL, None)
    (tmp_path / "metrics").mkdir()
    supervisor = Supervisor(pod, [], [], warm=False, copy_output=keep_reading)
    assert supervisor._build_report([]).step_hint == hint
    write_json(str(tmp_path / "metrics" / "0.log"), {"step": 1})
    assert not supervisor._build_report([]).step_hint
