"""Progress from a rank's log: valid patterns, the values that they find, and slow or broken patterns."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddp_operator.decide.pace import build_paced_progress
from ddp_pod.base.files import read_json, write_json
from ddp_pod.contract.log_patterns import LOG_GROUPS, compile_log_pattern
from ddp_pod.contract.series import SERIES
from ddp_pod.progress import log_reader
from ddp_pod.progress.log_patterns import _MATCH_SECONDS, LogProgress, PatternTooSlow
from ddp_pod.progress.log_reader import Lines, keep_reading, read_output
from ddp_pod.progress.output_ends import read_last_lines
from tests.support.launcher_config import launcher_pod

NOW = 1_700_000_000.0


def record_worker(folder: str, local_rank: int, rank: int, pid: int = 1) -> None:
    """Write a worker's record, as its shim does."""
    path = os.path.join(folder, "workers", f"{local_rank}.json")
    write_json(path, {"pid": pid, "rank": rank, "localRank": local_rank, "restart": 0})


def progress(*patterns: str) -> LogProgress:
    return LogProgress([compile_log_pattern(pattern) for pattern in patterns])


def values(seen: LogProgress) -> dict[str, float]:
    """Return the numbers that are known."""
    return {name: value for name in SERIES if (value := getattr(seen.build(0), name)) is not None}


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        (
            "(?P<step>[0-9]+",
            "is not a valid Python regular expression (missing ), unterminated subpattern at position 0)",
        ),
        ("loss", "has no named group, so it finds no value"),
        ("(?P<stepp>.)", "has the unknown group stepp; known groups: step, totalSteps"),
        ("(?P<step>a{99999999999999999999})", "is not a valid Python regular expression"),
    ],
)
def test_invalid_pattern_is_refused_with_remedy(pattern: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as refusal:
        compile_log_pattern(pattern)
    assert ";" in str(refusal.value)


def test_every_group_is_a_number_of_the_progress() -> None:
    assert set(LOG_GROUPS.values()) <= set(SERIES)


def test_groups_become_progress_of_status() -> None:
    seen = progress(
        r"epoch (?P<epoch>\d+)/(?P<epochs>\d+) step (?P<step>[\d,]+)/(?P<totalSteps>[\d,]+) loss=(?P<loss>\S+)"
        r" (?P<samplesPerSecond>\S+) img/s",
        r"val_acc (?P<valAccuracy>\S+) val_loss (?P<valLoss>\S+)",
    )
    assert seen.feed(b"epoch 2/10 step 1,500/6,000 loss=0.25 812.5 img/s\nval_acc 0.91 val_loss 0.3\n", NOW)
    status = build_paced_progress(seen.build(0))
    assert status is not None
    assert (status.epoch, status.epochs, status.step, status.total_steps) == (2, 10, 1500, 6000)
    assert (status.percent, status.loss, status.samples_per_second) == ("25.0%", "0.25", "812.5")
    assert (status.val_accuracy, status.val_loss) == ("0.91", "0.3")
    assert status.last_step_time == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)


STEP = r"step (?P<step>\d+)"
WITH_LOSS = r"^step (?P<step>\S+) loss (?P<loss>\S+)$"
OF_TOTAL = r"step (?P<step>\d+)/(?P<totalSteps>\d+)"
EPOCH_LINE = r"epoch (?P<epoch>\d+)(?:/(?P<epochs>\d+))? step (?P<step>\d+)/(?P<totalSteps>\d+)"
BEGINS = (OF_TOTAL, r"epoch (?P<epoch>\d+) begins", r"(?P<totalSteps>\d+) each")
TWO_EPOCHS = [b"epoch 1 begins\n", b"step 9/10\n", b"epoch 2 begins\n", b"step 1/10\n"]
RESTART = None


@pytest.mark.parametrize(
    ("patterns", "chunks", "expected"),
    [
        ([WITH_LOSS], [b"step 1", b"7 loss \x1b[32m0.5\x1b[0m\n"], {"step": 17, "loss": 0.5}),
        ([STEP], [b"step 17\n", b"\rstep 18\rstep 19\r"], {"step": 19, "steps": 3, "step_interval": 1}),
        ([STEP], [b"step 10\nstep 20\nstep 5\n", b"step 10\nstep 10\n"], {"steps": 1 + 10 + 1 + 5}),  # each epoch anew
        ([WITH_LOSS], [b"step one loss ?\n"], {"step": None, "loss": None}),
        ([WITH_LOSS], [b"step inf loss nan\n"], {"steps": None, "lost_loss_step": 0.0}),
        ([r"^step (?P<step>\d+)"], [b"step 3 " + b"x" * 70_000, b"x" * 70_000 + b"\n"], {"step": 3}),
        ([r"step (?P<step>\d+)$"], [*[b"\xff\x00x" * 20_000] * 64, b"\nstep 3\n"], {"step": 3}),
        ([r"seen (?P<samples>\d+)"], [b"seen 10\nseen 25\nseen 25\nseen 5\nseen 8\n"], {"samples": 33}),
        (BEGINS, TWO_EPOCHS, {"step": 11}),
        (BEGINS, [*TWO_EPOCHS, RESTART, b"10 each\n"], {"step": None}),
        (BEGINS, [*TWO_EPOCHS, RESTART, b"step 3/10\n"], {"step": None}),  # its epoch is not logged yet
        (BEGINS, [*TWO_EPOCHS, RESTART, b"epoch 2 begins\nstep 4/10\n"], {"step": 14}),
        (BEGINS, [b"epoch 1 begins\nstep 9/10\nstep 2/10\nstep 1/10\n"], {"step": 1, "total_steps": None}),
        ([EPOCH_LINE], [b"epoch 5 step 3/60\n"], {"step": None, "total_steps": None}),  # it started in a later epoch
        ([EPOCH_LINE], [b"epoch 5 step 3/60\nepoch 6 step 1/60\n"], {"step": 301, "total_steps": None}),
        ([EPOCH_LINE], [b"epoch 0 step 3/60\n", RESTART, b"epoch 1 step 4/60\n"], {"step": None}),
        ([EPOCH_LINE], [b"epoch 1 step 60/120\n"], {"step": 60, "total_steps": None}),
        ([EPOCH_LINE], [b"epoch 1 step 60/120\nepoch 2 step 61/120\n"], {"step": 61, "total_steps": 120}),  # of the run
    ],
)  # fmt: skip
def test_lines_become_progress(
    patterns: Sequence[str], chunks: Sequence[bytes | None], expected: dict[str, float | None]
) -> None:
    seen = progress(*patterns)
    for chunk in chunks:
        if chunk is RESTART:
            seen = seen.restarted()
        else:
            seen.feed(chunk, NOW)
    found = seen.build(0, 8)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.world_size == 8


@pytest.mark.parametrize(
    ("first", "epochs", "expected"),
    [
        (0, "/4", (65, 240, "27.1%")),
        (1, "/4", (65, 240, "27.1%")),
        (0, "", (65, None, None)),
        (1, "", (65, None, None)),
    ],
)
def test_steps_of_epoch_become_steps_of_run(
    first: int, epochs: str, expected: tuple[int, int | None, str | None]
) -> None:
    seen = progress(r"epoch (?P<epoch>\d+)(?:/(?P<epochs>\d+))?: (?P<step>\d+)/(?P<totalSteps>\d+)")
    for step in (1, 30, 60):
        seen.feed(f"epoch {first}{epochs}: {step}/60\n".encode(), NOW)
        status = build_paced_progress(seen.build(0))
        assert status is not None
        assert status.step == step
        assert status.percent != "100.0%"
        if not epochs:  # it may be the end of the run or of an epoch
            assert (status.total_steps, status.percent) == (None, None)
    seen.feed(f"epoch {first + 1}{epochs}: 5/60\n".encode(), NOW)
    status = build_paced_progress(seen.build(0))
    assert status is not None
    assert (status.step, status.total_steps, status.percent) == expected
    assert (status.epoch, values(seen)["steps"]) == (first + 1, 1 + 59 + 1)
    again = seen.restarted()
    again.feed(f"epoch {first + 2}{epochs}: 7/60\n".encode(), NOW)
    assert (values(again)["step"], values(again)["steps"]) == (127, 1)


def shown(seen: LogProgress, line: str) -> tuple[int | None, int | None, str | None]:
    seen.feed(f"{line}\n".encode(), NOW)
    status = build_paced_progress(seen.build(0))
    assert status is not None
    return status.step, status.total_steps, status.percent


def test_configured_epochs_complete_log_without_them() -> None:
    seen = LogProgress([compile_log_pattern(EPOCH_LINE)], epochs=2)
    assert shown(seen, "epoch 1 step 60/60") == (60, 120, "50.0%")
    assert shown(seen, "epoch 2 step 60/60") == (60, 120, "50.0%")  # a repeated number is no new step
    assert shown(seen, "epoch 2 step 59/60") == (119, 120, "99.2%")
    assert values(seen)["epochs"] == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("epoch 1/20 step 40/1200", (40, 1200, "3.3%")),  # 60 steps per epoch: within the first twentieth
        ("epoch 1/20 step 63/1200", (63, 24000, "0.3%")),
        ("epoch 5/20 step 280/1200", (280, 1200, "23.3%")),
        ("epoch 5/20 step 3/60", (243, 1200, "20.2%")),  # a run at a fifth of its epochs is not at 5 %
        ("epoch 1/1 step 60/60", (60, 60, "100.0%")),
        # Bounds are rounded by a step and a half. A process starting in a later epoch may count from 0.
        ("epoch 1/20 step 61/1200", (61, 1200, "5.1%")),
        ("epoch 1/20 step 62/1200", (62, 24000, "0.3%")),
        ("epoch 5/20 step 239/1200", (239, 1200, "19.9%")),
        ("epoch 5/20 step 238/1200", (5038, 24000, "21.0%")),
        ("epoch 5/20 step 361/1200", (361, 1200, "30.1%")),
        ("epoch 5/20 step 362/1200", (5162, 24000, "21.5%")),
    ],
)
def test_first_line_with_known_epochs_decides_whether_step_is_of_run(
    line: str, expected: tuple[int | None, int | None, str | None]
) -> None:
    assert shown(progress(EPOCH_LINE), line) == expected


@pytest.fixture
def interruptions() -> Iterator[None]:
    def give_up(number: int, frame: object) -> None:
        raise PatternTooSlow

    before = signal.signal(signal.SIGVTALRM, give_up)
    yield
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.usefixtures("interruptions")
def test_match_delayed_by_missing_cpu_is_not_slow() -> None:
    class Frozen:
        groupindex = {"step": 1}

        def search(self, text: str) -> re.Match[str] | None:
            time.sleep(3 * _MATCH_SECONDS)  # the process gets no CPU during the match
            return re.search(r"step (?P<step>\d+)", text)

    seen = LogProgress([Frozen()])  # type: ignore[list-item]
    for step in range(5):
        assert seen.feed(f"step {step}\n".encode(), NOW)
    assert values(seen)["step"] == 4


@pytest.mark.usefixtures("interruptions")
def test_catastrophic_pattern_is_disabled_and_others_continue(capsys: pytest.CaptureFixture[str]) -> None:
    seen = progress(r"(?P<loss>(a+)+)$", r"step (?P<step>\d+)")
    for step in (1, 2, 3, 4):
        seen.feed(b"a" * 64 + b"!\nstep %d\n" % step, NOW)
    assert values(seen)["step"] == 4
    assert "'(?P<loss>(a+)+)$' takes too long to match and is disabled" in capsys.readouterr().err


def test_lines_get_rank_prefix_once() -> None:
    lines = Lines()
    assert lines.feed(b"step 1\nste", 3, 0.0) == b"[rank3]: step 1\n"
    assert lines.rest
    assert lines.feed(b"p 2\n\n", 3, 0.5) == b"[rank3]: step 2\n[rank3]: \n"
    assert lines.feed(b"[rank3]: Traceback\n", 3, 0.6) == b"[rank3]: Traceback\n"  # torch's own prefix
    assert not lines.rest


def test_line_without_end_is_written_after_a_second_or_when_long() -> None:
    lines = Lines()
    assert lines.feed(b"password? ", 0, 10.0) == b""
    assert lines.feed(b"", 0, 10.9) == b""
    assert lines.feed(b"", 0, 11.1) == b"[rank0]: password? \n"
    assert lines.feed(b"\r10%", 0, 12.0) == b""
    assert lines.feed(b"\r20%\n", 0, 12.5) == b"[rank0]: \r10%\r20%\n"
    assert len(lines.feed(b"x" * 70_000, 0, 13.0)) == 70_000 + len("[rank0]: \n")


def test_reader_prefixes_lines_of_each_rank(tmp_path: Path) -> None:
    folder = str(tmp_path)
    os.mkdir(os.path.join(folder, "workers"))
    record_worker(folder, 1, rank=7)
    pod = launcher_pod(folder, node=3, nodes=4, nproc_per_node=2)
    pipes = [os.pipe() for _ in range(4)]
    (first, first_end), (second, second_end), (done, done_end), (log, log_end) = pipes
    child = os.fork()
    if not child:
        os.dup2(log_end, 1)
        for descriptor in (done_end, log):
            os.close(descriptor)
        read_output(pod, {0: first, 1: second}, done, marked=True)
        os._exit(0)
    os.write(first_end, b"one\ntwo")
    os.write(second_end, b"three\n")
    os.close(done_end)
    assert os.waitpid(child, 0)[1] == 0
    lines = os.read(log, 4096).splitlines()
    assert sorted(lines) == [b"[rank6]: one", b"[rank6]: two", b"[rank7]: three"]
    for descriptor in (first, first_end, second, second_end, done, log, log_end):
        os.close(descriptor)


def test_counters_restart_with_new_process(tmp_path: Path) -> None:
    """`ddp drill` detects a restart by it."""
    folder = str(tmp_path)
    for name in ("metrics", "workers", "output"):
        os.mkdir(os.path.join(folder, name))
    log_page = os.path.join(folder, "metrics", "0.log")
    record_worker(folder, 0, rank=0, pid=1)
    pod = launcher_pod(folder, log_patterns=(r"step (?P<step>\d+)",), epochs=1)
    source, source_end = os.pipe()
    done, done_end = os.pipe()
    log, log_end = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(log_end, 1)
        for descriptor in (done_end, log):
            os.close(descriptor)
        read_output(pod, {0: source}, done)
        os._exit(0)
    os.write(source_end, b"".join(b"step %d\n" % step for step in range(1, 40)))
    deadline = time.monotonic() + 60
    while not os.path.exists(log_page):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    record_worker(folder, 0, rank=0, pid=2)
    os.write(source_end, b"step 30\nstep 31\n")
    while read_json(log_page).get("step") != 31.0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    record_worker(folder, 0, rank=0, pid=3)  # it writes nothing
    os.close(done_end)
    assert os.waitpid(child, 0)[1] == 0
    assert read_last_lines(pod, 0) == ""
    assert (read_json(log_page)["step"], read_json(log_page)["steps"]) == (31.0, 2.0)
    for descriptor in (source, source_end, done, log, log_end):
        os.close(descriptor)


def test_reader_copies_everything_and_writes_page(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name in ("metrics", "workers", "output"):
        os.mkdir(os.path.join(folder, name))
    record_worker(folder, 0, rank=6)
    pod = launcher_pod(folder, node=3, nodes=4, log_patterns=(r"step (?P<step>\d+)", "(?P<broken>"), epochs=1)
    source, source_end = os.pipe()
    done, done_end = os.pipe()
    log, log_end = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(log_end, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for descriptor in (done_end, log):
            os.close(descriptor)
        read_output(pod, {0: source}, done)
        os._exit(0)
    text = b"hello\nstep 12\nand no end of line"
    os.write(source_end, text)
    os.close(done_end)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(log, 4096) == text
    record = read_json(os.path.join(folder, "metrics", "0.log"))
    assert (record["rank"], record["step"]) == (6, 12.0)
    assert read_last_lines(pod, 0) == "hello\nstep 12\nand no end of line"
    assert read_last_lines(pod, 1) == ""
    for descriptor in (source, source_end, done, log, log_end):
        os.close(descriptor)


def test_last_lines_of_native_crash_are_kept_before_reader_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "output").mkdir()
    pod = launcher_pod(tmp_path)
    monkeypatch.setattr(log_reader, "_write_all", lambda descriptor, data: None)
    rank = log_reader._RankOutput(pod, 0, LogProgress([]), None)
    rank.write(b"step 3\nterminate called ", 0)
    assert read_last_lines(pod, 0) == ""
    rank.write(b"after throwing an instance of 'c10::Error'\n", 0)
    assert read_last_lines(pod, 0) == "step 3\nterminate called after throwing an instance of 'c10::Error'"


def test_internal_error_of_reader_keeps_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogProgress, "feed", lambda self, chunk, now: {}["no step"])
    (tmp_path / "output").mkdir()
    pod = launcher_pod(tmp_path, log_patterns=(r"step (?P<step>\d+)",), epochs=2)
    pipes = [os.pipe() for _ in range(5)]
    (first, first_end), (second, second_end), (done, done_end), (log, log_end), (error, error_end) = pipes
    monkeypatch.setattr("ddp_pod.progress.log_reader.log", lambda text: os.write(error_end, text.encode()))
    child = os.fork()
    if not child:
        os.dup2(log_end, 1)
        for descriptor in (done_end, log):
            os.close(descriptor)
        keep_reading(pod, {0: first, 1: second}, done, marked=True)
        os._exit(0)
    os.write(first_end, b"step 1\n")
    first_lines = os.read(log, 4096)
    os.write(second_end, b"step 2\n")
    os.close(done_end)
    assert os.waitpid(child, 0)[1] == 0
    assert first_lines + os.read(log, 4096) == b"[rank0]: step 1\nstep 2\n"
    logged = os.read(error, 8192)
    assert logged.startswith(b"internal error in the log reader; log patterns and rank prefixes are disabled.")
    assert b"KeyError: 'no step'" in logged
    for descriptor in (first, first_end, second, second_end, done, log, log_end, error, error_end):
        os.close(descriptor)


def test_last_lines_are_few_short_and_without_colours(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    text = (
        "\n".join(f"line {number}" for number in range(40)) + "\n\n10%\r20%\r\x1b[31mred\x1b[0m\n" + "x" * 1000 + "\xff"
    )
    (tmp_path / "output" / "0.end").write_bytes(text.encode("latin-1"))
    lines = read_last_lines(pod, 0).splitlines()
    assert lines == [*(f"line {number}" for number in range(29, 40)), "10%", "20%", "red", "x" * 300]


@pytest.mark.parametrize(
    "word",
    [
        "W1122 10:06:35.1 5 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 5692 closing signal",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0",
    ],
)
def test_summary_of_nested_torchrun_is_cut_off(tmp_path: Path, word: str) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    cause = '  File "/lib/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 3, in f\nValueError: bad'
    summary = f"{word}\nTraceback (most recent call last):\nRoot Cause (first observed failure):\n"
    (tmp_path / "output" / "0.end").write_text(f"{cause}\n{summary}")
    assert read_last_lines(pod, 0) == cause.strip()
    (tmp_path / "output" / "0.end").write_text(summary)
    assert read_last_lines(pod, 0) == summary.rstrip()


def test_progress_has_the_share_of_the_total() -> None:
    seen = progress(r"step (?P<step>\d+)/(?P<totalSteps>\d+) epoch (?P<epoch>\d+)/(?P<epochs>\d+)")
    seen.feed(b"step 1/4 epoch 1/1\nstep 3/4 epoch 1/1\n", NOW)
    found = seen.build(2)
    assert (found.rank, found.step, found.steps, found.share) == (2, 3.0, 3.0, 0.75)
    seen.feed(b"step 5/4 epoch 1/1\n", NOW)
    assert seen.build(2).share == 1.0


@pytest.mark.usefixtures("interruptions")
def test_disabled_pattern_is_not_searched() -> None:
    seen = progress(r"(?P<loss>(a+)+)$", r"step (?P<step>\d+)")
    line = b"a" * 64 + b"!\n"
    counts = []
    for _ in range(4):
        seen.feed(line, NOW)
        counts.append(len(seen._patterns))
    assert counts == [2, 2, 1, 1]
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert [pattern.pattern for pattern in seen._patterns] == [r"step (?P<step>\d+)"]


@pytest.mark.parametrize(
    ("steps", "interval"), [((20,), 20.0), ((20, 40, 60), 20.0), ((0, 20, 40), 20.0), ((210, 220), 10.0), ((0,), 1.0)]
)
def test_page_has_the_steps_between_two_lines_of_the_log(steps: tuple[int, ...], interval: float) -> None:
    progress = LogProgress([compile_log_pattern(r"step (?P<step>\d+)")])
    for step in steps:
        progress.feed(f"step {step}\n".encode(), 0.0)
    assert progress.build(0).step_interval == interval
