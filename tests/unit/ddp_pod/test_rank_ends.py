"""Ranks that exited with 0: a traceback at the end of their output, processes that still run, missing steps."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from rich.console import Console

from ddp_pod.base.files import write_json
from ddp_pod.contract.failure_record import RankEnd
from ddp_pod.contract.progress import RankProgress
from ddp_pod.contract.records import to_json
from ddp_pod.failures.rank_ends import (
    RemainingProcess,
    examine_rank_ends,
    find_dead_helper,
    find_printed_traceback,
    find_remaining_processes,
)
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.rank import counters as slots
from ddp_pod.rank.counter_slots import open_slot
from ddp_pod.rank.counters import CounterMemory
from tests.support.launcher_config import launcher_pod

LABEL = "label 17 out of range"


def _raise(message: str) -> None:
    raise ValueError(message)


def print_traceback(message: str = LABEL) -> str:
    try:
        _raise(message)
    except ValueError:
        return traceback.format_exc()
    raise AssertionError


def print_rich(message: str, width: int) -> str:
    try:
        _raise(message)
    except ValueError:
        console = Console(file=io.StringIO(), width=width)
        console.print_exception(show_locals=True)
        return str(vars(console)["_file"].getvalue())
    raise AssertionError


def log_as_json() -> str:
    return json.dumps({"level": "error", "exc_info": print_traceback()[:-1], "at": "12:00"}) + "\n"


LOGURU = """\
2026-11-27 10:00:00.000 | ERROR    | __main__:<module>:9 - failed
Traceback (most recent call last):

> File "/app/train.py", line 7, in <module>
    main()
    └ <function main at 0x7f0000000000>

  File "/app/train.py", line 4, in main
    raise ValueError("label 17 out of range")

ValueError: label 17 out of range
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/app/train.py", line 2, in <module>
  |     raise ExceptionGroup("many", errors)
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: label 17 out of range
    +------------------------------------
"""
CUDA = print_traceback("CUDA error: device-side assert triggered") + (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace might be wrong.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
)
WARNED = f"/app/train.py:3: UserWarning: retry\n{print_traceback()}  warnings.warn(text)\n"
STACK = 'Stack (most recent call last):\n  File "/app/train.py", line 3, in <module>\n    main()\n'
FAULTHANDLER = 'Fatal Python error\n\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\nok\n'
BAR = "\rtrain:  33%|███▎      | 10/30 [00:00<00:01, 12.3it/s]"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (print_traceback(), LABEL),
        ("step 10/30\n" + print_traceback(), LABEL),
        (print_traceback().replace("Traceback", "[rank1]: Traceback").replace("\n  ", "\n[rank1]:   "), LABEL),
        ("".join(f"[worker 1] {line}\n" for line in print_traceback().splitlines()), LABEL),
        ("ERROR:root:failed, " + print_traceback(), LABEL),
        (print_traceback() + BAR + "\n", LABEL),
        (print_traceback() + "wandb: view run at https://wandb.ai/x\n", LABEL),
        (print_traceback()[len("Traceback (most recent call last):\n") :], LABEL),
        (print_rich(LABEL, 100), LABEL),
        (log_as_json(), LABEL),
        (LOGURU, LABEL),
        (GROUP, "many (1 sub-exception)"),
        (CUDA, "CUDA error: device-side assert triggered"),
        (print_traceback("a\n\tb"), "a"),
    ],
)
def test_traceback_at_the_end_of_an_output_is_found(output: str, expected: str) -> None:
    found = find_printed_traceback(output)
    assert found is not None
    assert found.is_last
    assert found.message in (expected, LABEL)


def test_message_that_rich_wraps_is_no_output_after_the_traceback() -> None:
    message = "[/long/path/" + "x" * 60 + "] " + "expected input with 3 channels " * 6
    found = find_printed_traceback(print_rich(message, 80)[-8192:])
    assert found is not None
    assert found.is_last
    assert found.message == message.strip()


@pytest.mark.parametrize(
    "output",
    [
        print_traceback() + "retrying\nstep 11/30\nstep 30/30\n",
        print_traceback() + "recovered\n",
        print_traceback() + BAR + BAR.replace("33%", "100%") + "\n",
        print_rich(LABEL, 100) + "recovered\n",
    ],
)
def test_output_after_a_traceback_makes_it_a_former_one(output: str) -> None:
    found = find_printed_traceback(output)
    assert found is not None
    assert not found.is_last


@pytest.mark.parametrize(
    "output",
    [
        "",
        "step 30/30\ndone\n",
        "UserWarning: see the Traceback (most recent call last) below\ndone\n",
        WARNED,
        "Exception ignored in: <function DataLoader.__del__ at 0x7f>\n" + print_traceback(),
        STACK,
        STACK + "done\n",
        FAULTHANDLER,
        '  File "/app/train.py", line 3, in <module>\ndone: 3 files\n',
        "Traceback (most recent call last):\n",
    ],
)
def test_output_without_an_exception_has_no_traceback(output: str) -> None:
    assert find_printed_traceback(output) is None


def build_rank(folder: Path, *, output: str, steps: int, total: int | None = None, owner: int = 0) -> RankReader:
    for name in ("workers", "output", "metrics"):
        (folder / name).mkdir()
    record = {"pid": 1, "rank": 3, "localRank": 0, "restart": 0, "worldSize": 4}
    (folder / "workers" / "0.json").write_text(json.dumps(record))
    (folder / "output" / "0.end").write_text(output)
    if total is not None:
        progress = RankProgress(3, is_counted=True, step=steps, steps=steps, total_steps=total)
        write_json(str(folder / "metrics" / "0.log"), to_json(progress))
    counters = CounterMemory(str(folder), 1)
    slot = open_slot(str(folder), 0)
    slot[slots.PID] = 1.0
    slot[slots.VISIBILITY] = slots.COUNTED
    slot[slots.STEPS] = steps
    slot[slots.OWNER] = owner
    return RankReader(str(folder), counters)


LEFT = (RemainingProcess(77, "python train.py"),)
COMMAND = ("python train.py",)
LOST = print_traceback("x").replace("ValueError: x", "RuntimeError: [gloo] Connection closed by peer")


@pytest.mark.parametrize(
    ("output", "steps", "total", "owner", "left", "expected"),
    [
        ("done\n", 30, 30, 0, (), None),
        ("done\n", 29, 30, 0, (), None),
        ("done\n", 30, 30, 0, LEFT, None),  # a service
        ("done\n", 0, None, 0, (), None),  # the operator decides about a job without a step
        ("done\n", 15, 30, 0, (), RankEnd(3, 15.0, 30.0)),
        ("done\n", 0, None, 0, LEFT, RankEnd(3, processes=COMMAND)),
        ("done\n", 5, None, 77, LEFT, RankEnd(3, 5.0, processes=COMMAND)),
        (print_traceback(), 30, 30, 0, (), RankEnd(3, 30.0, exception=f"ValueError: {LABEL}")),
        (print_traceback() + "bye\n", 30, 30, 0, (), None),
        (print_traceback() + "bye\n", 10, 30, 0, (), RankEnd(3, 10.0, 30.0, f"ValueError: {LABEL}")),
        (LOST, 5, None, 0, (), RankEnd(3, 5.0, None, "RuntimeError: [gloo] Connection closed by peer", True)),
    ],
)
def test_rank_that_may_not_have_trained_to_its_end_is_recorded(
    tmp_path: Path,
    output: str,
    steps: int,
    total: int | None,
    owner: int,
    left: tuple[RemainingProcess, ...],
    expected: RankEnd | None,
) -> None:
    metrics = build_rank(tmp_path, output=output, steps=steps, total=total, owner=owner)
    ends = examine_rank_ends(launcher_pod(tmp_path), metrics, {0: left})
    assert ends == ((expected,) if expected is not None else ())


@pytest.mark.parametrize(
    ("record", "output", "expected"),
    [
        ({"keeper": "thread x", "since": 1.0, "ended": True}, "done\n", RankEnd(3, 30.0, keeper="thread x")),
        ({"keeper": "thread x", "ended": True}, f"{print_traceback()}bye\n", RankEnd(3, 30.0, keeper="thread x")),
        ({"keeper": "thread x", "since": 1.0}, "done\n", None),
        ({"keeper": 7, "ended": True}, "done\n", None),
    ],
)
def test_rank_that_the_launcher_ended_names_what_kept_it(
    tmp_path: Path, record: dict[str, object], output: str, expected: RankEnd | None
) -> None:
    metrics = build_rank(tmp_path, output=output, steps=30, total=30, owner=0)
    write_json(str(tmp_path / "output" / "0.ending"), record)
    assert examine_rank_ends(launcher_pod(tmp_path), metrics, {}) == ((expected,) if expected else ())


def test_processes_of_ranks_are_found_by_their_environment() -> None:
    command = [sys.executable, "-c", "input()", "serve.py", "--token=secret"]
    environments = [{**os.environ, "LOCAL_RANK": "1"}, {**os.environ, "OTHER": "1"}]
    started = [subprocess.Popen(command, env=env, stdin=subprocess.PIPE) for env in environments]
    helper = [*command, "/x/torch/bin/torch_shm_manager"]
    started.append(subprocess.Popen(helper, env=environments[0], stdin=subprocess.PIPE))
    try:
        pids = [process.pid for process in started]
        found = find_remaining_processes([*pids, 2**22 + 1])
        assert found == {1: [RemainingProcess(pids[0], f"{os.path.basename(sys.executable)} serve.py")]}
    finally:
        for process in started:
            process.kill()
            process.communicate()


HELPER_SCRIPT = """
import multiprocessing, sys, threading
def fail():
    raise ValueError("record 37 has 7 of 8 fields")
kind = sys.argv[1]
if kind == "thread":
    thread = threading.Thread(target=fail, name="prefetch")
    thread.start()
    thread.join()
elif kind == "process":
    child = multiprocessing.get_context("fork").Process(target=fail, name="reader-1")
    child.start()
    child.join()
elif kind == "feeder":
    queue = multiprocessing.get_context("fork").Queue()
    queue.put(lambda: 1)
    queue.close()
    queue.join_thread()
else:
    try:
        fail()
    except ValueError:
        import traceback
        traceback.print_exc()
print("step 38", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("kind", "origin", "message"),
    [
        ("thread", "thread prefetch", "record 37 has 7 of 8 fields"),
        ("process", "Process reader-1", "record 37 has 7 of 8 fields"),
        ("feeder", "the feeder thread of a queue", "Can't pickle"),
        ("handled", "", ""),
    ],
)
def test_exception_that_nobody_caught_names_the_helper_that_it_ended(kind: str, origin: str, message: str) -> None:
    done = subprocess.run([sys.executable, "-c", HELPER_SCRIPT, kind], stderr=subprocess.PIPE, text=True, check=False)
    found = find_dead_helper(done.stderr)
    assert (found.origin if found is not None else "") == origin, done.stderr
    if found is not None:
        assert message in found.text


def test_spawned_process_that_fails_before_its_target_is_a_helper(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import multiprocessing\nmultiprocessing.get_context('spawn').Process(target=print).start()\n")
    done = subprocess.run([sys.executable, script], stderr=subprocess.PIPE, text=True, check=False)
    found = find_dead_helper(done.stderr)
    assert found is not None, done.stderr
    assert found.origin == "a spawned process"
    assert found.message.startswith("An attempt has been made to start a new process before the current process has")


def test_exception_of_a_helper_decides_where_the_rank_has_only_lost_it(tmp_path: Path) -> None:
    output = (
        'Process SyncManager-1:\nTraceback (most recent call last):\n  File "/lib/python3.11/a.py", line 3, in f\n'
        "    self.bind()\nOSError: AF_UNIX path too long\n"
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    Manager()\nEOFError\n'
    )
    helper = find_dead_helper(output)
    assert helper is not None
    assert helper.origin == "Process SyncManager-1"

    for folder in ("errors", "output"):
        (tmp_path / folder).mkdir()
    chain = [{"types": ["EOFError"], "place": "/lib/python3.11/multiprocessing/connection.py"}]
    error = {"type": "EOFError", "message": "", "exitCode": 1, "chain": chain}
    write_json(str(tmp_path / "errors/0.json"), error)
    pod = launcher_pod(tmp_path)
    assert "DataLoader worker" in examine_worker(pod, WorkerEnd(1)).remedy
    (tmp_path / "output/0.end").write_text(output)
    failure = examine_worker(pod, WorkerEnd(1))
    assert "caused by OSError: AF_UNIX path too long" in failure.message
    assert "TMPDIR" in failure.remedy
    assert failure.container_exit_code == 81


def test_thread_is_recognized_by_its_first_frame_if_other_output_has_torn_the_line_with_its_name() -> None:
    output = (
        "[rank0]: Exception in thread progress 0/60\n"
        "[rank0]: train:\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner\n'
        "[rank0]:     self.run()\n"
        "[rank0]: ValueError: bad label\n"
    )
    printed = find_dead_helper(output)
    assert printed is not None
    assert (printed.text, printed.origin, printed.is_thread) == ("ValueError: bad label", "thread of the rank", True)
