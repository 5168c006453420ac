"""The termination message, including those that no launcher would write."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_operator.decide.failures import Termination
from ddp_operator.reading.terminations import parse_termination
from ddp_pod.contract.progress import RankProgress
from tests.support.builders import NOW, last_words


def parse(words: Any, code: int = 82, reason: str = "Error", finished: datetime | None = NOW) -> Termination:
    text = words if isinstance(words, str) else json.dumps(words)
    return parse_termination(code, reason, text, finished)


def test_message_of_launcher_is_parsed() -> None:
    end = parse(
        last_words("CUDAError", rank=5, podIndex=1, exitCode=3, message="boom", traceback="tb", remedy="h", restarts=2)
    )
    assert (end.category, end.rank, end.pod_index, end.exit_code, end.container_exit_code) == ("CUDAError", 5, 1, 3, 82)
    assert (end.message, end.traceback, end.remedy, end.restarts, end.secondary) == ("boom", "tb", "h", 2, False)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("\x1b]0;title\x07words", "words"),
        ("\U000e0041\u3164words of https://me:pass@host/x?sig=1", "words of https://***@host/x?sig=***"),
        ("\x1b]8;;http://example.com\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("two\n\tlines", "two\n\tlines"),
        ("50%\rdone\x00\x08\x9b", "50%done"),
        ("\u202egnirts", "gnirts"),
        ("GLHF! \U0001f3d6\ufe0f done \u2714\u200d", "GLHF!  done "),
        ("\u9519\u8bef: \u2265 2 \u00b0C \u2502", "\u9519\u8bef: \u2265 2 \u00b0C \u2502"),
        ("größer 数 🙂", "größer 数 "),
    ],
)
def test_control_characters_of_pod_are_removed(text: str, kept: str) -> None:
    end = parse(last_words(message=text, traceback=text, remedy=text))
    assert (end.message, end.traceback, end.remedy) == (kept, kept, kept)
    assert parse(text).message == kept.rpartition("\n")[2].strip()


@pytest.mark.parametrize(
    ("code", "category"),
    [
        (81, "UserError"),
        (83, "Hang"),
        (84, "OOM"),
        (85, "Preempted"),
        (86, "Network"),
        (82, "Unknown"),
        (1, "Unknown"),
        (137, "Killed"),
        (143, "Killed"),
    ],
)
@pytest.mark.parametrize("words", ["", "plain text", {"category": "NoSuchCategory"}, {"category": ""}])
def test_exit_code_decides_category_without_message(code: int, category: str, words: Any) -> None:
    assert parse(words, code).category == category


@pytest.mark.parametrize(
    ("code", "reason", "text", "message"),
    [
        (143, "Error", "", "the pod was killed by signal 15"),
        (137, "Error", " \n", "the pod was killed by signal 9"),
        (1, "Error", "", "the container ended with exit code 1 (Error)"),
        (1, "", "", "the container ended with exit code 1"),
        (128, "StartError", 'exec: "python3": not found', 'exec: "python3": not found'),
        (1, "Error", "Traceback\nValueError: x\n", "ValueError: x"),
        (137, "Error", "step 3", "the pod was killed by signal 9"),
    ],
)
def test_end_without_message_is_described(code: int, reason: str, text: str, message: str) -> None:
    end = parse(text, code, reason)
    assert (end.message, end.traceback) == (message, text.strip() if "\n" in text.strip() else "")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (1, "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding"),
        (127, "/usr/bin/python3: error while loading shared libraries: /opt/lib/libm.so.6: file too short"),
    ],
)
def test_python_that_cannot_start_ends_the_job(code: int, line: str) -> None:
    end = parse(f"before\n{line}\n\n  <no Python frame>\n", code, "Error")
    assert (end.category, end.permanent, end.message) == ("UserError", True, line)
    assert "PYTHONHOME" in end.remedy
    assert not parse(f"before\n{line}\n", 137, "Error").permanent, "its launcher was killed"


def test_kubelet_oom_kill_overrides_message() -> None:
    end = parse(last_words("UserError"), 137, "OOMKilled")
    assert (end.category, end.secondary) == ("OOM", False)
    assert "resources.limits.memory" in end.remedy


@pytest.mark.parametrize("category", ["OOM", "UserError"])
def test_out_of_memory_keeps_rank_that_launcher_has_reported(category: str) -> None:
    """The kernel has killed a process of the container, not its first one."""
    end = parse(last_words(category, rank=3, exitCode=137, traceback="t"), 84, "OOMKilled")
    assert (end.category, end.rank, end.exit_code, end.traceback) == ("OOM", 3, 137, "t")
    secondary = parse(last_words("Network", rank=1, secondary=True), constants.EXIT_PEER_LOST, "OOMKilled")
    assert (secondary.category, secondary.secondary) == ("Network", True)
    for later, code in (("Preempted", 85), ("UserError", 81)):
        assert parse(last_words(later), code, "OOMKilled").category == later, "the kill was that of an earlier rank"


@pytest.mark.parametrize(
    ("reason", "text", "permanent"),
    [
        ("StartError", 'runc create failed: exec: "python3": executable file not found in $PATH: unknown', True),
        ("ContainerCannotRun", 'OCI runtime: exec: \\"/app/run\\": stat /app/run: no such file or directory', True),
        ("StartError", "nvidia-container-cli: initialization error: driver not loaded: unknown", False),
        ("Error", 'exec: "python3": executable file not found in $PATH', False),
    ],
)
def test_image_without_program_is_users_error_that_no_retry_helps(reason: str, text: str, permanent: bool) -> None:
    end = parse(text, 128, reason)
    assert (end.category, end.permanent) == (("UserError", True) if permanent else ("Unknown", False))
    assert ("is not in the image" in end.remedy) is permanent


def test_hang_is_secondary_only_where_message_states_it() -> None:
    words = last_words("Hang")
    del words["secondary"]
    assert parse({**words, "secondary": True}, constants.EXIT_HANG).secondary
    assert not parse(words, constants.EXIT_HANG).secondary


def test_peer_lost_exit_code_is_secondary_with_any_message() -> None:
    assert parse(last_words("NCCL", secondary=False), constants.EXIT_PEER_LOST).secondary
    assert parse("", constants.EXIT_PEER_LOST).secondary


@pytest.mark.parametrize(
    "words",
    [
        "{", "[]", "null", "3", '"x"', "[" * 100_000, "{" * 50_000, '{"rank": "x"}', '{"rank": 1.5}', '{"message": 3}',
        '{"progress": {"a": "b"}}', '{"time": 1e999}', '{"time": "now"}', '{"message": "\\ud800"}', "\ud800", "\x00",
        '{"secondary": 1}', "x" * 10_000_000, '{"message": "' + "x" * 10_000_000 + '"}',
    ],
    ids=lambda words: words[:20],
)  # fmt: skip
def test_garbage_is_mere_text_of_bounded_size(words: str) -> None:
    end = parse(words)
    assert end.category == "Unknown"
    assert 0 < len(end.message) <= 2048
    end.message.encode()


def test_long_strings_are_cut_at_least_informative_end() -> None:
    end = parse(last_words("OOM", message="m" * 9000 + "!", traceback="!" + "t" * 9000 + "end", remedy="h" * 9000))
    assert (len(end.message), len(end.traceback), len(end.remedy)) == (2048, 2048, 2048)
    assert end.traceback.endswith("end")
    assert end.message.startswith("m")


@pytest.mark.parametrize("number", [2**31, -(2**31), 10**30])
def test_numbers_that_no_api_server_would_store_are_dropped(number: int) -> None:
    end = parse(last_words("OOM", rank=number, podIndex=number, exitCode=number, restarts=number))
    assert (end.rank, end.pod_index, end.exit_code) == (None, None, None)
    assert 0 <= end.restarts < 2**31


@pytest.mark.parametrize(
    ("shift", "believed"),
    [
        (0, True), (-10, True), (-3599, True), (-7200, False), (7200, False),
    ],
)  # fmt: skip
def test_launchers_clock_is_trusted_near_kubelets(shift: float, believed: bool) -> None:
    end = parse(last_words("OOM", time=NOW.timestamp() + shift))
    assert end.time == NOW.timestamp() + (shift if believed else 0)


@pytest.mark.parametrize("time", [-1, 0, 1e300, 1e18, None])
@pytest.mark.parametrize("finished", [NOW, None, datetime(1, 1, 1, tzinfo=UTC)])
def test_time_is_always_storable(time: float | None, finished: datetime | None) -> None:
    end = parse(last_words("OOM", time=time), finished=finished)
    assert end.time in (None, NOW.timestamp())


def test_progress_without_number_is_ignored() -> None:
    progress = parse(last_words(progress={"step": "x", "epoch": True, "loss": 2.5, "other": 1})).progress
    assert progress == RankProgress(loss=2.5)


@pytest.mark.parametrize(
    ("code", "reason", "decided", "expected"),
    [
        (143, "Error", 81, 81),
        (137, "Error", 81, 81),
        (137, "OOMKilled", 81, 137),
        (143, "Error", 0, 143),
        (86, "Error", 81, 86),
    ],
)
def test_end_that_the_launcher_had_decided_outlasts_the_signal_that_killed_it(
    code: int, reason: str, decided: int, expected: int
) -> None:
    text = json.dumps({"version": 1, "category": "UserError", "containerExitCode": decided, "message": "bad label"})
    end = parse(text, code, reason)
    assert (end.container_exit_code, end.permanent) == (expected, expected == 81)
