"""A user's view during and after a run."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TextIO, cast

import pytest
from msgspec.structs import replace

from ddp_cli.local.ending import describe_run
from ddp_cli.local.folder import RunFolder
from ddp_cli.view.display import (
    Display,
    FaultTolerantStream,
    PlainDisplay,
    RichDisplay,
    View,
    choose_display,
    describe_view,
)
from ddp_operator.api.status import Condition, LastFailure, Progress, Restarts, Status

PROGRESS = Progress(
    epoch=3, epochs=8, step=71, total_steps=184, percent="38.6%", eta="7s", loss="0.11",
    throughput="1024 samples/s", val_accuracy="0.96",
)  # fmt: skip


class ScreenClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TerminalBuffer(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    """Return the messages without the times."""
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


def test_view_has_one_line() -> None:
    assert describe_view(View("Pending", 1, "0/2 pods scheduled")) == "Pending  0/2 pods scheduled"
    statement = describe_view(View("Running", 2, "", PROGRESS))
    assert statement == (
        "Running  attempt 2  epoch 3/8  step 71/184  38.6%  ETA 7s  loss 0.11  val acc 0.96  1024 samples/s"
    )
    stalled = replace(PROGRESS, throughput=None, steps_per_second="16")
    assert describe_view(View("Running", 2, "", stalled)).endswith("val acc 0.96"), "no rate while steps have stopped"


def test_plain_lines_are_printed_at_phase_changes_and_intervals() -> None:
    clock = ScreenClock()
    stream = io.StringIO()
    display = PlainDisplay(stream, every=5, clock=clock)
    display.update(View("Pending", 1, "waits"))
    display.update(View("Running", 1))
    clock.now += 60
    display.update(View("Running", 1))
    for step in range(100):  # one a second and more would be a flood
        clock.now += 0.125
        display.update(View("Running", 1, "", Progress(step=step)))
    display.update(View("Restarting", 2))
    statement = lines(stream)
    assert statement[:2] == ["Pending  waits", "Running"]
    assert statement[2:-1] == ["Running  step 0", "Running  step 40", "Running  step 80"], "at once, then every 5 s"
    assert statement[-1] == "Restarting  attempt 2"


def test_bar_shows_percentage_and_metrics_and_is_removed_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = TerminalBuffer()
    display = RichDisplay(stream, "digits")
    display.line("before")
    display.update(View("Running", 2, "", PROGRESS))
    display.line("[red]not markup[/red]")
    display.close()
    shown = stream.getvalue()
    for words in ("before", "digits", "attempt 2", "38.6%", "epoch 3/8", "[red]not markup[/red]"):
        assert words in shown
    assert shown.rstrip("\r").endswith("\x1b[2K"), "the line is erased: what follows is the summary"


@pytest.mark.parametrize(
    ("stream", "term", "quiet", "plain", "kind"),
    [
        (TerminalBuffer(), "xterm", False, False, RichDisplay),
        (TerminalBuffer(), "xterm", False, True, PlainDisplay),
        (TerminalBuffer(), "dumb", False, False, PlainDisplay),
        (io.StringIO(), "xterm", False, False, PlainDisplay),
        (TerminalBuffer(), "xterm", True, False, Display),
    ],
)
def test_stream_and_options_choose_display(
    stream: io.StringIO, term: str, quiet: bool, plain: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(choose_display("x", stream, quiet=quiet, plain=plain)) is kind


# --- summary ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x" / "logs").mkdir(parents=True)
    return RunFolder(tmp_path / "runs" / "x")


def condition(kind: str, value: str, reason: str, message: str) -> Condition:
    time = "2026-11-20T12:00:00Z"
    return Condition(type=kind, status=value, reason=reason, message=message, last_transition_time=time)  # type: ignore[arg-type]


FAILURE = LastFailure(
    attempt=2, rank=1, pod_index=1, pod="x-2-1-abcde", exit_code=1, category="UserError", message="ValueError: bad",
    traceback="\n".join(f"line {number}" for number in range(40)), remedy="check the data", conclusion="failed 2 times",
)  # fmt: skip
FAILED = Status(
    phase="Failed",
    attempt=2,
    restarts=Restarts(all=1, used=1),
    last_failure=FAILURE,
    conditions=(
        condition("Failed", "True", "RestartBudgetExhausted", "failed 2 times; last: UserError: ValueError: bad"),
    ),
)


def test_success_is_summarized_with_results_and_paths(folder: RunFolder) -> None:
    folder.metrics.write_text("time,samples_per_second\n1,100\n2,300\n")
    status = Status(phase="Succeeded", attempt=1, progress=PROGRESS)
    text = describe_run("digits", status, folder, seconds=75, interrupted=False)
    assert text.splitlines()[0] == "digits: Succeeded after 1m15s (1 attempt, no restarts)"
    assert "validation accuracy 0.96, loss 0.11, epoch 3 of 8, step 71" in text
    assert "200 samples/s mean, 300 maximum" in text
    folder.metrics.write_text("time,samples_per_second,steps_per_second\n1,,0.5\n2,,2.5\n")
    text = describe_run("digits", status, folder, seconds=75, interrupted=False)
    assert "1.5 steps/s mean, 2.5 maximum, 2.5 at the end\n" in text
    folder.metrics.write_text("time,samples_per_second,steps_per_second\n1,100,0.5\n2,300,2.5\n3,200,1\n4,0,0\n")
    trained = replace(status, progress=replace(PROGRESS, throughput="2.2 steps/s"))
    text = describe_run("digits", trained, folder, seconds=75, interrupted=False)
    assert "200 samples/s mean, 300 maximum, 200 at the end\n" in text, "one unit, and no maximum below the end"
    assert f"run folder: {os.path.join('runs', 'x')}" in text
    assert "metrics.csv, logs/" in text


def test_failure_is_summed_up_with_cause_place_traceback_hint_and_log(folder: RunFolder) -> None:
    (folder.logs / "attempt-2-pod-1.log").touch()
    text = describe_run("x", FAILED, folder, seconds=5, interrupted=False)
    assert "x: Failed after 5s (2 attempts, 1 restart)" in text
    assert "RestartBudgetExhausted: failed 2 times\n" in text
    assert "cause:      UserError: ValueError: bad" in text
    assert "where:      rank 1, pod x-2-1-abcde, exit code 1, attempt 2" in text
    assert "line 39" in text
    assert "line 24" not in text, "only the tail"
    assert text.index("cause:") < text.index("RestartBudgetExhausted:")
    assert "hint:       check the data" in text
    assert f"log:        {os.path.join('runs', 'x', 'logs', 'attempt-2-pod-1.log')}" in text


def test_cause_is_not_repeated(folder: RunFolder) -> None:
    once = condition("Failed", "True", "UserError", "UserError (rank 1): ValueError: bad")
    failed = replace(FAILED, conditions=(once,), last_failure=replace(FAILURE, conclusion=""))
    text = describe_run("x", failed, folder, seconds=5, interrupted=False)
    assert text.count("ValueError: bad") == 1


def test_exhausted_budget_is_not_mentioned_if_no_restart_was_allowed(folder: RunFolder) -> None:
    text = describe_run("x", replace(FAILED, restarts=Restarts()), folder, seconds=5, interrupted=False)
    assert ("cause:" in text, "RestartBudgetExhausted" in text) == (True, False)


def test_screen_without_reader_is_silenced_with_one_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lost: list[OSError] = []
    with open(writer, "w") as stream:
        screen = FaultTolerantStream(stream, lost.append)
        for _ in range(3):
            PlainDisplay(cast(TextIO, screen)).line("training")
        stream.write("at the end")  # as the interpreter flushes the remaining output: no error
    assert [type(error) for error in lost] == [BrokenPipeError]
