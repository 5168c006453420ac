"""The error file of a rank, the tracebacks in its output, and how a chain of exceptions decides."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_pod.base.exceptions import find_exceptions
from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.failure_table import Outcome
from ddp_pod.failures import worker_failure
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import add_last_lines, examine_worker, unwrap_helper_error
from ddp_pod.rank.tracebacks import (
    explain_permission,
    find_exit_code,
    fold_libraries,
    record_exception,
)
from tests.support import ROOT
from tests.support.launcher_config import launcher_pod
from tests.support.rank_errors import ABOUT, catch, examine

WIRE_LIMIT = 2048  # characters kept of a traceback in a record
SCRIPT = Outcome("UserError", 82)
FATAL = Outcome("UserError", 81)
MEMORY = Outcome("OOM", 84)
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/ckpt/step-4.pt")
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def record(error: BaseException, folder: Path) -> dict[str, Any] | None:
    """Return the error file of an exception."""
    path = folder / "error.json"
    record_exception(error, str(path), ABOUT)
    written: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return written


def exit_after(cause: Exception, code: object, *, hidden: bool = False) -> None:
    try:
        raise cause
    except Exception:
        if hidden:
            raise SystemExit(code) from None
        raise SystemExit(code)  # noqa: B904  as wrappers do


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("work", "kind", "message", "code", "last"),
    [
        (lambda: int("x"), "ValueError", "invalid literal for int() with base 10: 'x'", 1, "ValueError: "),
        (lambda: json.loads("{"), "json.decoder.JSONDecodeError", "Expecting property name", 1, "json.decoder."),
        (lambda: exit_after(ValueError("bad"), 3), "SystemExit", "ValueError: bad", 3, "ValueError: bad"),
        (lambda: exit_after(ValueError(), 3), "SystemExit", "ValueError", 3, "ValueError"),
        (lambda: exit_after(ValueError("bad"), 3, hidden=True), "SystemExit", "3", 3, "SystemExit: 3"),
        (lambda: exit_after(ValueError("bad"), "in words"), "SystemExit", "in words", 1, "SystemExit: in words"),
        (lambda: exit_after(ValueError("bad"), 511), "SystemExit", "ValueError: bad", 255, "ValueError: bad"),
        (lambda: exit_after(ValueError("bad"), -1), "SystemExit", "ValueError: bad", 255, "ValueError: bad"),
        (lambda: argparse.ArgumentParser(prog="x").parse_args(["--y"]), "SystemExit", "x: error: unrecognized", 2, "S"),
    ],
)  # fmt: skip
def test_exception_is_recorded_with_type_and_reason(
    work: Callable[[], object], kind: str, message: str, code: int, last: str, tmp_path: Path
) -> None:
    error = record(catch(work), tmp_path)
    assert error is not None
    assert {name: error[name] for name in ("rank", "localRank", "restart")}.items() <= ABOUT.items()
    assert (error["type"], error["exitCode"]) == (kind, code)
    assert error["message"].startswith(message)
    assert error["message"] == error["message"].strip()
    assert error["traceback"].splitlines()[-1].startswith(last)
    assert error["time"] > 1_600_000_000


class Ambiguous:
    def __bool__(self) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    def __str__(self) -> str:
        return "an array"


@pytest.mark.parametrize(("code", "expected"), [(None, 0), (False, 0), (True, 1), ("", 1), (3, 3), (Ambiguous(), 1)])
def test_exit_code_is_that_of_the_interpreter(code: Any, expected: int) -> None:
    assert find_exit_code(SystemExit(code)) == expected


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
        (ValueError("a" * 1024 + "b" * 1024), "a" * 1024 + "b" * 1024),
        (ValueError("a" * 1024 + "c" + "b" * 1024), "a" * 1024 + "\n...\n" + "b" * 1024),
        (
            ValueError("no such class:\n" + "\n".join(f"class {n}" for n in range(5000))),
            "no such class:\n"
            + "".join(f"class {n}\n" for n in range(7))
            + "... 4989 lines ...\n"
            + "\n".join(f"class {n}" for n in range(4996, 5000)),
        ),
        (Unspeakable(), "<the exception cannot be shown>"),
    ],
    ids=["long", "longer", "lines", "unspeakable"],
)
def test_long_message_keeps_both_ends_and_the_frames(error: Exception, message: str, tmp_path: Path) -> None:
    with contextlib.suppress(type(error)):
        raise error  # so that it has a frame
    recorded = record(error, tmp_path)
    assert recorded is not None
    assert recorded["message"] == message
    assert recorded["traceback"].startswith("Traceback (most recent call last):\n  File ")
    assert len(recorded["traceback"]) < WIRE_LIMIT


def test_long_line_of_a_helper_leaves_its_frames_in_the_traceback(tmp_path: Path) -> None:
    head = "Caught ValueError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    frame = '  File "train.py", line 7, in __getitem__\n    raise ValueError(text)\n'
    recorded = record(ValueError(f"{head}{frame}ValueError: record 20: {'x' * 300_000}\n"), tmp_path)
    assert recorded is not None
    assert 'File "train.py", line 7' in recorded["traceback"]
    assert len(recorded["traceback"]) < WIRE_LIMIT
    assert unwrap_helper_error(recorded["type"], recorded["message"])[1].startswith("record 20: xxx")


def test_first_exception_of_a_group_is_its_cause_and_the_groups_frames_remain(tmp_path: Path) -> None:
    errors = [ValueError(f"shard {number}: {'x' * 1000}") for number in range(200)]
    group = catch(lambda: raise_group(errors))
    recorded = record(group, tmp_path)
    assert recorded is not None
    assert recorded["chain"][-1]["message"].startswith("shard 0: ")
    assert "raise_group" in recorded["traceback"]
    assert len(recorded["traceback"]) < WIRE_LIMIT


def raise_group(errors: list[ValueError]) -> None:
    raise ExceptionGroup("200 shards are invalid", errors)


def test_long_traceback_of_a_helper_keeps_its_last_line(tmp_path: Path) -> None:
    frames = "".join(f'  File "/lib/python3/x.py", line {n}, in call\n    return self.call()\n' for n in range(400))
    head = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    recorded = record(OSError(f"{head}{frames}OSError: no img_17.jpg\n"), tmp_path)
    assert recorded is not None
    unwrapped = unwrap_helper_error(recorded["type"], recorded["message"])
    assert unwrapped == ("OSError", "no img_17.jpg (in DataLoader worker process 1)")


def test_permission_error_names_process_and_owner(tmp_path: Path) -> None:
    tmp_path.chmod(0o751)
    owner = tmp_path.stat()
    place = f"; {tmp_path} is owned by uid {owner.st_uid}, group {owner.st_gid}, mode 0751)"
    for name in (str(tmp_path), str(tmp_path / "new" / "file")):
        explanation = explain_permission(PermissionError(13, "Permission denied", name))
        assert explanation.startswith(f" (process of uid {os.geteuid()}, groups ")
        assert explanation.endswith(place)
    assert explain_permission(PermissionError(1, "Operation not permitted")).count(";") == 0

    failure = examine(chain(PermissionError(13, "denied", str(tmp_path))), tmp_path)
    assert failure.message.endswith(place)
    assert "securityContext.fsGroup" in failure.remedy


def test_program_without_permission_to_execute_is_told_from_a_file_of_another_user(tmp_path: Path) -> None:
    program = tmp_path / "convert.sh"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError) as raised:
        subprocess.run([program], check=True)
    assert f"{program} is owned by" in explain_permission(raised.value)
    assert "chmod +x" in examine(chain(raised.value), tmp_path).remedy
    opened = PermissionError(13, "Permission denied", str(program))
    assert "securityContext.fsGroup" in examine(chain(opened), tmp_path).remedy


@pytest.mark.parametrize(("limit", "lasting"), [(1000, True), (resource.RLIM_INFINITY, False)])
def test_file_beyond_the_limit_of_the_process_is_lasting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, lasting: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    recorded = record(OSError(errno.EFBIG, "File too large"), tmp_path)
    assert recorded is not None
    assert recorded["chain"][0]["lasting"] is lasting


def test_rank_without_free_descriptor_records_its_exception(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'operator')!r})\n"
        "from ddp_pod.rank.tracebacks import record_exception\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "kept = []\n"
        "try:\n    while True: kept.append(open('/dev/null'))\n"
        f"except OSError as error: record_exception(error, 'error.json', {ABOUT})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert json.loads((tmp_path / "error.json").read_text())["chain"][0]["errno"] == errno.EMFILE


def test_handler_that_raises_does_not_prevent_the_record(tmp_path: Path) -> None:
    class Interrupting(Exception):
        def __str__(self) -> str:
            os.kill(os.getpid(), signal.SIGCHLD)
            return "boom"

    def fail(number: int, frame: object) -> None:
        raise RuntimeError("worker is killed")

    former = signal.signal(signal.SIGCHLD, fail)
    try:
        recorded = record(Interrupting(), tmp_path)
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert recorded is not None
    assert recorded["message"] == "boom"


# ---- chains


def raise_in_library(error: BaseException) -> None:
    exec(compile("raise error", "/x/site-packages/torch/x.py", "exec"), {"error": error})


def raise_in_script(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def chain(outer: BaseException, *causes: BaseException, link: str = "cause") -> Callable[[], None]:
    """Return a function that raises an exception with those that explain it, were handled, or are suppressed."""

    def work() -> None:
        if not causes:
            raise_in_library(outer)
        try:
            chain(causes[0], *causes[1:], link=link)()
        except BaseException as cause:
            if link == "handled":
                raise outer  # noqa: B904
            raise outer from cause if link == "cause" else None

    return work


STREAM = RuntimeError("basic_ios::clear: iostream error")
LOST = type("DistNetworkError", (RuntimeError,), {"__module__": "torch.distributed"})("Connection reset by peer")
LOST_PEER = Outcome("Network", 86, True)
CLOSED = RuntimeError("[tcp/pair.cc:553] Connection closed by peer in gloo")


@pytest.mark.parametrize(
    ("work", "outcome", "remedy", "cause"),
    [
        (chain(RuntimeError("cannot save"), NO_SPACE), SCRIPT, "volume is full", "(caused by OSError: [Errno 28] "),
        (chain(RuntimeError("unexpected"), STREAM, link="handled"), SCRIPT, "volume is full", "basic_ios::clear"),
        (chain(UnboundLocalError("f"), NO_SPACE, link="handled"), SCRIPT, "volume is full", "No space left"),
        (chain(ValueError("lr"), NO_SPACE, link="suppressed"), SCRIPT, "fix the line", ""),
        (chain(KeyError("lr"), REFUSED, link="handled"), SCRIPT, "refuses: link == 'handled'", ""),
        (chain(RuntimeError("no tracker"), REFUSED, link="handled"), SCRIPT, "request to a", "Connection refused"),
        (chain(OSError(errno.EXDEV, "voll", "/dev/shm/x", None, "y")), FATAL, "different file systems", ""),
        (chain(SystemExit(1), ValueError("x"), NO_SPACE), SCRIPT, "volume is full", "No space left"),
        (chain(urllib.error.URLError(REFUSED)), SCRIPT, "request to a service", "Connection refused"),
        (chain(RuntimeError("x", MemoryError("all"))), MEMORY, "memory limit", "all"),
        (chain(RuntimeError("rank 1 ends"), LOST), LOST_PEER, "earliest failure", "reset by peer"),
        (chain(type("Full", (OSError,), {})(errno.EDQUOT, "voll")), SCRIPT, "quota", ""),
        (chain(type("Much", (MemoryError,), {})("voll")), MEMORY, "memory limit", ""),
        (raise_in_script(KeyError("cuda out of memory, nccl timed out")), FATAL, "fix the line", ""),
        (raise_in_script(RuntimeError("nccl or gloo: connection closed by setting")), SCRIPT, "fix the line", ""),
        (raise_in_script(CLOSED), LOST_PEER, "earliest failure", ""),
        (raise_in_script(RuntimeError("CUDA error handling: pass --device")), SCRIPT, "fix the line", ""),
        (raise_in_script(ValueError("out of memory budget must be > 0")), SCRIPT, "fix the line", ""),
        (raise_in_script(ValueError("loss is nan")), SCRIPT, "learning rate", ""),
        (lambda: os.environ["DDP_NO_SUCH_VARIABLE"], FATAL, "set the variable in env", ""),
        (lambda: {}["key"], FATAL, "fix the line", ""),
    ],
)
def test_chain_of_exceptions_decides_by_its_most_certain_evidence(
    work: Callable[[], object], outcome: Outcome, remedy: str, cause: str, tmp_path: Path
) -> None:
    failure = examine(work, tmp_path)
    assert failure.outcome == outcome
    assert remedy in failure.remedy
    assert cause in failure.message


@pytest.mark.parametrize("chain", [3, [3], [{}], [{"types": []}], [{"types": ["A"], "message": 3}], [{"b": 1}]])
def test_malformed_chain_in_error_file_is_ignored(chain: object, tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    error = {"type": "OSError", "message": "[Errno 28] voll: '/ckpt/x'", "traceback": "", "chain": chain}
    (tmp_path / "errors" / "0.json").write_text(json.dumps(error))
    assert "volume is full" in examine_worker(launcher_pod(tmp_path), WorkerEnd(1)).remedy


def plant_mounts(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, free: int = 0, inodes: int = 9) -> None:
    mounts = folder / "mounts"
    mounts.write_text(text)
    monkeypatch.setattr(worker_failure, "_MOUNTS", str(mounts))
    status = os.statvfs_result((4096, 4096, 8192, free, free, 9, inodes, inodes, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)


@pytest.mark.parametrize(
    ("path", "free", "inodes", "message"),
    [
        ("", 0, 9, "the volume at /ckpt is full: tmpfs of 32 MiB"),
        ("", 0, 0, "the volume at /ckpt has too many files"),
        ("/ckpt/a/b.pt", 0, 9, "the volume at /ckpt is full"),
        ("/ckpt2/b.pt", 0, 9, ""),
        ("", 1 << 20, 9, ""),
    ],
)
def test_full_volume_is_named(
    path: str, free: int, inodes: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = "x / nfs rw 0 0\nx /ro ext4 ro 0 0\nx /ckpt tmpfs rw,size=32m 0 0\n"
    plant_mounts(tmp_path, monkeypatch, mounts, free, inodes)
    failure = examine(chain(OSError(errno.ENOSPC, "No space left on device", *filter(None, [path]))), tmp_path)
    assert message in failure.message
    assert message or "volume at" not in failure.message
    assert "the disk or volume is full" in failure.remedy


def test_full_shared_memory_has_its_own_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_mounts(tmp_path, monkeypatch, "x /dev/shm tmpfs rw 0 0\n")
    assert "spec.sharedMemory" in examine(chain(OSError(errno.ENOSPC, "voll")), tmp_path).remedy


@pytest.mark.parametrize("is_named", [True, False])
def test_write_without_a_reason_names_no_volume_but_that_of_its_file(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python would write truncated bytecode of what torch.save imports (python/cpython#126606).
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def save() -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            torch.save(torch.ones(100000), tmp_path / "last.pt")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    plant_mounts(tmp_path, monkeypatch, f"x {tmp_path if is_named else '/other'} tmpfs rw 0 0\n")
    failure = examine(save, tmp_path)
    assert ("the volume at" in failure.message) is is_named
    assert "ulimit -f" in failure.remedy


def test_folder_that_torch_save_lacks_is_a_missing_path(tmp_path: Path) -> None:
    failure = examine(lambda: torch.save(torch.ones(1), tmp_path / "new" / "last.pt"), tmp_path)
    assert "create its folder" in failure.remedy


# ---- tracebacks as text


def test_chain_in_output_of_program_is_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "try:\n    raise OSError(28, 'voll', '/ckpt/x')\nexcept OSError:\n    raise RuntimeError('cannot save')\n"
    )
    output = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True).stderr
    (found,) = find_exceptions(output)
    assert [(facts.types, facts.handled, facts.by_script) for facts in found] == [
        (("RuntimeError",), False, True),
        (("OSError",), True, True),
    ]
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text(output)
    completed = add_last_lines(launcher_pod(tmp_path), Failure(local_rank=0, exit_code=1))
    assert "volume is full" in completed.remedy


HEAD = "Traceback (most recent call last):\n"
TRACE = f'[rank1]: {HEAD}[rank1]:   File "/app/x.py", line 3, in <module>\n[rank1]:     f()\n'


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (f"{TRACE}[rank1]: ValueError: bad label: 7", [("ValueError", "bad label: 7")]),
        (f"{TRACE}[rank1]: AssertionError\nbye", [("AssertionError", "")]),
        (f"{TRACE}[rank1]: A: 1\n{TRACE}[rank1]: B: 2\n{TRACE.replace('1]', '0]')}[rank0]: C", [("B", "2"), ("C", "")]),
        ('  File "t.py", line 3\nKeyboardInterrupt', [("KeyboardInterrupt", "")]),
        (TRACE, []),
        (f"{TRACE}[rank1]: and then all was well", []),
        ("ValueError: no traceback", []),
        ("", []),
    ],
)
def test_last_exception_of_each_rank_is_found(lines: str, expected: list[tuple[str, str]]) -> None:
    assert [(found[0].types[0], found[0].message) for found in find_exceptions(lines)] == expected


def frame(path: str, name: str) -> str:
    return f'  File "{path}", line 7, in {name}\n    {name}()\n    ^^^^^^\n'


def test_long_traceback_keeps_the_scripts_own_lines() -> None:
    library = "/usr/lib/python3.11/site-packages/torch/nn.py"
    deep = "".join(frame(library, f"deep{number}") for number in range(9))
    own = frame("/app/model.py", "forward")
    text = f"{HEAD}{frame('/app/train.py', 'main')}{deep}{own}{deep}KeyError: 'lr'\n"
    start = f"{HEAD}{frame('/app/train.py', 'main')}  ... 9 calls inside libraries ...\n"
    last_two = deep[-2 * len(deep) // 9 :]
    assert fold_libraries(text) == f"{start}{own}  ... 7 calls inside libraries ...\n{last_two}KeyError: 'lr'\n"


@pytest.mark.parametrize(("calls", "is_folded"), [(1, False), (2, True)])
def test_calls_inside_libraries_are_folded_only_if_that_saves_lines(calls: int, is_folded: bool) -> None:
    own = "".join(frame("/app/train.py", f"own{number}") for number in range(9))
    inside = "".join(frame("/lib/python3.11/x.py", f"deep{number}") for number in range(calls))
    assert ("inside libraries" in fold_libraries(f"{HEAD}{inside}{own}KeyError: 'lr'\n")) is is_folded
    at_the_end = f"{HEAD}{own}{inside}KeyError: 'lr'\n"
    assert fold_libraries(at_the_end) == at_the_end


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}{frame('/app/x.py', 'main')}{frame('/lib/python3.9/x.py', 'f')}E\n",
        f"{frame('/lib/python3/dist-packages/x.py', 'f') * 9}E: x\n",
        "",
    ],
    ids=["short", "without own lines", "empty"],
)
def test_traceback_that_needs_no_folding_is_unchanged(text: str) -> None:
    assert fold_libraries(text) == text


class Response:
    """A response as those of requests and httpx."""

    def __init__(self, status: int) -> None:
        self.status_code = status


class ApiError(Exception):
    """An error of a client library. Its module is not the script's."""

    def __init__(self, response: object) -> None:
        super().__init__("request failed")
        self.response = response


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (urllib.error.HTTPError("http://h/x", 403, "Forbidden", None, None), "token or credentials"),  # type: ignore[arg-type]
        (ApiError(Response(401)), "token or credentials"),
        (ApiError({"ResponseMetadata": {"HTTPStatusCode": 404}}), "the object's name"),
        (ApiError(Response(429)), "retry with growing pauses"),
        (urllib.error.HTTPError("http://h/x", 503, "Unavailable", None, None), "retry with growing"),  # type: ignore[arg-type]
    ],
)
def test_status_of_a_service_decides_the_remedy(error: Exception, remedy: str, tmp_path: Path) -> None:
    assert remedy in examine(chain(error), tmp_path).remedy


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (OSError(errno.EIO, os.strerror(errno.EIO), "/data/shard-3.tar"), "NodeFault"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "NodeFault"),
        (OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/data/shard-3.tar"), "UserError"),
    ],
)
def test_fault_of_the_machine_has_a_category_that_moves_the_pod(
    error: Exception, category: str, tmp_path: Path
) -> None:
    failure = examine(chain(error), tmp_path)

    assert (failure.category, failure.container_exit_code) == (category, 82)
    assert failure.signature != ""
