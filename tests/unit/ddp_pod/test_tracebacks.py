"""The error file of a rank: its content, and when it is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.rank.tracebacks import explain_permission, find_exceptions, record_exception

ABOUT = {"rank": 5, "localRank": 1, "restart": 2}


def record(error: BaseException, folder: Path) -> dict[str, Any] | None:
    path = folder / "error.json"
    record_exception(error, str(path), ABOUT)
    error: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return error


def raised(work: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 a SystemExit is no Exception
        work()
    return caught.value


def exit_after(cause: Exception, code: object) -> None:
    try:
        raise cause
    except Exception:
        raise SystemExit(code)  # noqa: B904  as wrappers do


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("work", "kind", "message", "code"),
    [
        (lambda: int("x"), "ValueError", "invalid literal for int() with base 10: 'x'", 1),
        (lambda: json.loads("{"), "json.decoder.JSONDecodeError", "Expecting property name", 1),
        (lambda: exit_after(ValueError("bad"), 3), "SystemExit", "ValueError: bad", 3),
        (lambda: exit_after(ValueError(), 3), "SystemExit", "ValueError", 3),
        (lambda: exit_after(ValueError("bad"), "in words"), "SystemExit", "in words", 1),
        (lambda: exit_after(ValueError("bad"), 511), "SystemExit", "ValueError: bad", 255),
        (lambda: exit_after(ValueError("bad"), -1), "SystemExit", "ValueError: bad", 255),
        (lambda: argparse.ArgumentParser(prog="x").parse_args(["--y"]), "SystemExit", "x: error: unrecognized", 2),
    ],
)
def test_exception_is_recorded_with_type_and_reason(
    work: Callable[[], object], kind: str, message: str, code: int, tmp_path: Path
) -> None:
    error = record(raised(work), tmp_path)
    assert error is not None
    assert {name: error[name] for name in ABOUT} == ABOUT
    assert (error["type"], error["exitCode"]) == (kind, code)
    assert error["message"].startswith(message)
    assert error["message"] == error["message"].strip()
    assert "Traceback" in error["traceback"]
    assert error["time"] > 1_600_000_000


@pytest.mark.parametrize("code", [0, None])
def test_successful_script_has_no_error_file(code: int | None, tmp_path: Path) -> None:
    assert record(SystemExit(code), tmp_path) is None


def test_error_file_of_script_is_kept_and_full_disk_ignored(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("{}")
    assert record(ValueError("x"), tmp_path) == {}
    assert record(ValueError("x"), tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a" * 4096 + "b" * 4096), "a" * 4096 + "b" * 4096),
        (ValueError("a" * 4096 + "c" + "b" * 4096), "a" * 4096 + "\n...\n" + "b" * 4096),
        (Unspeakable(), "<the exception cannot be shown>"),
    ],
    ids=["long", "longer", "unspeakable"],
)
def test_long_message_keeps_both_ends(error: Exception, message: str, tmp_path: Path) -> None:
    recorded = record(error, tmp_path)
    assert recorded is not None
    assert recorded["message"] == message


def test_permission_error_names_user_and_owner(tmp_path: Path) -> None:
    tmp_path.chmod(0o751)
    owner = tmp_path.stat()
    words = f"; {tmp_path} is owned by uid {owner.st_uid}, group {owner.st_gid}, mode 0751)"
    for name in (str(tmp_path), str(tmp_path / "new" / "file")):
        assert explain_permission(PermissionError(13, "Permission denied", name)).endswith(words)
    assert explain_permission(PermissionError(1, "Operation not permitted")).count(";") == 0
    recorded = record(PermissionError(13, "Permission denied", str(tmp_path)), tmp_path)
    assert recorded is not None
    assert recorded["message"].endswith(words)


@pytest.mark.parametrize(
    ("lines", "exceptions"),
    [
        ('  File "t.py", line 3\n    x = 1\nValueError: bad', [("ValueError", "bad")]),
        ('  File "t.py", line 3\nKeyboardInterrupt', [("KeyboardInterrupt", "")]),
        ("ValueError: bad", []),
        ('  File "t.py", line 3\n    x = 1', []),
        (
            '[rank1]:   File "t.py", line 3\n[rank0]:   File "t.py", line 3\n[rank1]: A: 1\n[rank0]: B: 2',
            [("A", "1"), ("B", "2")],
        ),
    ],
)
def test_last_exception_of_each_rank_is_found(lines: str, exceptions: list[tuple[str, str]]) -> None:
    assert [(chain[0].types[0], chain[0].message) for chain in find_exceptions(lines)] == exceptions
