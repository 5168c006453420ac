"""What is known about ranks that a signal has killed: faulthandler's report, and files that they map."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_pod.base.exceptions import EndedChild
from ddp_pod.base.files import write_json
from ddp_pod.base.runtime_files import MAPPINGS
from ddp_pod.failures.crashes import (
    SIGNALS,
    explain_bus_error,
    find_shortened,
    is_complete,
    read_crash,
)
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import HELPER_ENDED, add_last_lines, examine_worker
from ddp_pod.progress.log_reader import _RankOutput
from ddp_pod.progress.output_ends import read_end
from ddp_pod.rank.end_notes import MappedFile, note_path
from ddp_pod.rank.ended_children import find_ended_child
from ddp_pod.rank.mapped_files import list_mapped_files
from tests.support.launcher_config import launcher_pod

CRASH = """
import ctypes, faulthandler, sys, threading, time
faulthandler.enable()
def wait():
    time.sleep(60)
def deep(depth):
    return deep(depth - 1) if depth else ctypes.string_at(0)
threading.Thread(target=wait, daemon=True).start()
libc = ctypes.CDLL(None)
if sys.argv[1] == "own":
    ctypes.string_at(0)
elif sys.argv[1] == "deep":
    deep(120)
else:
    thread = ctypes.c_ulong()
    abort = ctypes.cast(libc.abort, ctypes.c_void_p)
    libc.pthread_create(ctypes.byref(thread), None, abort, None)
    wait()
"""


def crash(kind: str) -> str:
    done = subprocess.run([sys.executable, "-c", CRASH, kind], capture_output=True, text=True, check=False)
    assert done.returncode < 0
    return done.stderr


def test_report_shows_the_thread_that_crashed_and_no_other() -> None:
    report = read_crash(f"step 3\n{crash('own')}")
    assert report is not None
    assert report.text.startswith("Fatal Python error: Segmentation fault\n  File ")
    assert "in string_at" in report.text
    assert "in wait" not in report.text
    assert report.note == "in native code, called by <module> (<string>:11)"
    assert not report.remedy, "the line cannot be read"


def test_abort_has_the_reason_that_the_c_library_printed() -> None:
    report = read_crash(f"step 3\nfree(): invalid pointer\n{crash('own').replace('Segmentation fault', 'Aborted')}")
    assert report is not None
    assert report.note == "in native code, called by <module> (<string>:11) after the line 'free(): invalid pointer'"


def test_crash_of_a_native_thread_blames_no_line_of_python() -> None:
    report = read_crash(crash("native"))
    assert report is not None
    assert (report.text, report.note) == ("Fatal Python error: Aborted", "in a thread without Python code")


def test_stack_of_equal_calls_is_recursion() -> None:
    report = read_crash(crash("deep"))
    assert report is not None
    assert report.note.startswith("recursion of deep (<string>:")
    assert report.text.count("\n") == 15


def test_recursion_through_a_library_is_that_of_the_script() -> None:
    module = '  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line {} in {}'
    names = ((1789, "_call_impl"), (1778, "_wrapped_call_impl"))
    cycle = [
        *(module.format(*name) for name in names),
        '  File "/code/train.py", line 69 in <listcomp>',
        '  File "/code/train.py", line 69 in forward',
    ]
    head = ["Fatal Python error: Segmentation fault", "", "Current thread 0x00007f (most recent call first):"]
    report = read_crash("\n".join([*head, *cycle * 25, "  ..."]))
    assert report is not None
    assert report.note == "recursion of forward (train.py:69) has exhausted the stack"
    assert "ulimit -s" in report.remedy
    whole = read_crash("\n".join([*head, *cycle * 8]))
    assert whole is not None
    assert "recursion" not in whole.note, "as a deep model has"


def test_output_without_a_report_has_none_and_one_that_arrives_is_awaited() -> None:
    assert read_crash("step 3\n") is None
    assert is_complete("step 3\n")
    assert not is_complete("step 3\nFatal Python error: ")
    assert is_complete(crash("own"))
    assert is_complete(crash("native"))
    assert not is_complete(crash("deep").rpartition("  ...")[0])


@pytest.mark.skipif(sys.platform != "linux", reason="mappings of a process are read from /proc")
def test_mapped_file_that_was_shortened_explains_a_bus_error(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    data = tmp_path / "tokens of train.bin"
    data.write_bytes(b"x" * 100_000)
    with data.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        files = list_mapped_files(os.getpid())
        assert len(mapped) == 100_000
    own = [known for known in files if known.path == str(data)]
    assert own == [MappedFile(str(data), data.stat().st_ino, 102_400)]
    assert not any(known.path.endswith(".so") for known in files)
    assert not find_shortened(own), "it is complete"

    os.truncate(data, 5000)
    write_json(note_path(pod.runtime, 0, MAPPINGS), {"files": files})
    text = f"the file {data} has only 5000 bytes, and the rank maps 102400"
    assert explain_bus_error(pod, 0).note == text
    failure = add_last_lines(pod, examine_worker(pod, WorkerEnd(-signal.SIGBUS)))
    assert failure.message == f"worker killed by SIGBUS: {text}"
    assert failure.signature == "SIGBUS"
    assert "/dev/shm" not in failure.remedy

    error = {"type": "ConnectionResetError", "message": "[Errno 104]", "exitCode": 1, "child": ["Process-3", -7]}
    chain = [
        {"types": ["ConnectionResetError"], "errno": 104, "place": "/lib/python3.11/multiprocessing/connection.py"}
    ]
    (tmp_path / "errors").mkdir()
    write_json(str(tmp_path / "errors/0.json"), {**error, "chain": chain})
    failure = examine_worker(pod, WorkerEnd(1))
    assert failure.message.endswith(f"(its process Process-3 was killed by SIGBUS: {text})")
    assert "in place" in failure.remedy
    assert failure.signature == HELPER_ENDED

    (tmp_path / "new").write_bytes(b"")
    (tmp_path / "new").replace(data)  # another file of this name
    assert "only" not in explain_bus_error(pod, 0).note


@pytest.mark.parametrize(
    ("size", "free", "word"), [(64, 64, "sharedMemory"), (9000, 10, "sharedMemory"), (9000, 8000, "dmesg")]
)
def test_bus_error_is_one_of_shared_memory_if_that_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, free: int, word: str
) -> None:
    space = SimpleNamespace(f_bavail=free, f_blocks=size, f_frsize=1 << 20)
    monkeypatch.setattr("os.statvfs", lambda path: space)
    known = explain_bus_error(launcher_pod(tmp_path), 0)
    assert known.note == f"/dev/shm of {size} MiB has {free} MiB free"
    assert word in known.remedy


@pytest.mark.parametrize("content", [{}, {"files": 3}, {"files": [3, ["a", "b", 1], ["a", 1]]}])
def test_invalid_list_of_mappings_explains_nothing(tmp_path: Path, content: dict[str, object]) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    write_json(note_path(pod.runtime, 0, MAPPINGS), content)
    assert "bytes" not in explain_bus_error(pod, 0).note


@pytest.mark.parametrize(
    ("number", "word", "signature"),
    [
        (signal.SIGILL, "instruction", "SIGILL"),
        (signal.SIGFPE, "divided", "SIGFPE"),
        (signal.SIGSYS, "seccomp", "SIGSYS"),
        (signal.SIGALRM, "timer", "SIGALRM"),
        (signal.SIGUSR2, "no handler", "SIGUSR2"),
        (signal.SIGXFSZ, "ulimit -f", "SIGXFSZ"),
        (signal.SIGABRT, "native code", "SIGABRT"),
        (signal.SIGHUP, "nohup", "SIGHUP"),
    ],
)
def test_signal_has_a_remedy_of_its_own(tmp_path: Path, number: signal.Signals, word: str, signature: str) -> None:
    failure = examine_worker(launcher_pod(tmp_path), WorkerEnd(-number))
    assert word in failure.remedy
    assert failure.signature == signature
    assert failure.remedy == SIGNALS[number].remedy


def test_child_that_a_signal_kills_explains_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(60,), name="loader-2")
    child.start()
    try:
        assert find_ended_child(ValueError()) is None, "it lives"
        monkeypatch.setattr("ddp_pod.rank.ended_children._SECONDS_FOR_END", 60.0)
        threading.Timer(0.1, lambda: os.kill(child.pid, signal.SIGBUS)).start()
        assert find_ended_child(ConnectionResetError()) == EndedChild("loader-2", -signal.SIGBUS)
    finally:
        child.kill()
        child.join()


def test_children_that_cannot_be_read_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(name="a", _popen=SimpleNamespace(poll=lambda: 0))
    children = [None, ended, SimpleNamespace(name=3, _popen=SimpleNamespace(poll=lambda: -9))]
    monkeypatch.setattr("multiprocessing.process._children", children)
    assert find_ended_child(ValueError()) is None


def test_killed_child_precedes_one_with_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"loader-1": 3, "loader-2": -9}
    children = [
        SimpleNamespace(name=name, _popen=SimpleNamespace(poll=lambda code=code: code)) for name, code in codes.items()
    ]
    monkeypatch.setattr("multiprocessing.process._children", children)
    assert find_ended_child(ValueError()) == EndedChild("loader-2", -9)


def test_end_of_a_rank_has_room_for_a_whole_report_with_long_paths(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    frames = '  File "/data/projects/%s/train.py", line 17 in __repr__\n' % ("a-long-folder/" * 10) * 100
    text = (
        f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n{frames}  ...\n"
    )
    output = _RankOutput(pod, 0, SimpleNamespace(), None)  # type: ignore[arg-type]
    output.write(text.encode(), 0)
    output.write_end()
    crash = read_crash(read_end(pod, 0))
    assert crash is not None
    assert "recursion of __repr__" in crash.note
