"""Calls by which a script ends its own process, or sets a timer that does."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_pod.base.files import write_json
from ddp_pod.base.runtime_files import OWN_END
from ddp_pod.contract.names import EXIT_RETRYABLE, EXIT_USER_ERROR
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import HELPER_ENDED, examine_worker
from ddp_pod.rank.end_notes import OwnEnd, note_path, read_own_ends
from tests.support.launcher_config import launcher_pod

_SHIM = "import sys; from ddp_pod.rank.own_ends import observe_own_ends; observe_own_ends(sys.argv[1]); "
_RUN = "exec(compile(open(sys.argv[2]).read(), sys.argv[2], 'exec'), {'__name__': '__main__'})"


def run_script(folder: Path, line: str) -> tuple[int, dict[int, OwnEnd]]:
    """Run a line of a script. Return its exit code, negative for a signal, and what it has noted."""
    script = folder / "train.py"
    script.write_text(f"import os, signal, time, multiprocessing\n\ndef stop():\n    {line}\n\nstop()\n")
    notes = folder / "notes.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _SHIM + _RUN, str(notes), str(script)], env=environment, check=False)
    return done.returncode, read_own_ends(str(notes))


@pytest.mark.parametrize(
    ("line", "exit_code", "call"),
    [
        ("os._exit(4)", 4, "os._exit()"),
        ("os.abort()", -signal.SIGABRT, "os.abort()"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "os.kill()"),
        ("signal.raise_signal(signal.SIGUSR1)", -signal.SIGUSR1, "signal.raise_signal()"),
        ("signal.alarm(1); time.sleep(60)", -signal.SIGALRM, "signal.alarm()"),
        ("signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(60)", -signal.SIGALRM, "signal.setitimer()"),
        (
            "signal.signal(14, print); signal.alarm(1); signal.signal(14, signal.SIG_DFL); time.sleep(60)",
            -signal.SIGALRM,
            "signal.alarm()",
        ),
    ],
)
def test_call_that_ends_a_process_is_noted_with_its_place(tmp_path: Path, line: str, exit_code: int, call: str) -> None:
    ended, notes = run_script(tmp_path, line)
    assert ended == exit_code
    noted = notes[exit_code if exit_code > 0 else 128 - exit_code]
    assert (noted.call, noted.place) == (call, "stop (train.py:4)")
    assert noted.is_timer == (exit_code == -signal.SIGALRM)


@pytest.mark.parametrize(
    "line",
    [
        "signal.alarm(0)",
        "os.kill(os.getpid(), 0)",
        "os._exit(0)",
        "child = multiprocessing.get_context('fork').Process(target=int, args=('x',)); child.start(); child.join()",
    ],
)
def test_call_that_ends_no_process_is_not_noted(tmp_path: Path, line: str) -> None:
    assert run_script(tmp_path, line) == (0, {})


@pytest.mark.parametrize(
    ("argument", "code", "call"), [("'no index'", 1, "sys.exit('no index')"), ("5", 5, "sys.exit()"), ("0", 0, "")]
)
def test_exit_of_a_child_is_noted_with_its_text(tmp_path: Path, argument: str, code: int, call: str) -> None:
    context = "multiprocessing.get_context('fork').Process"
    line = f"import sys; child = {context}(target=lambda: sys.exit({argument})); child.start(); child.join()"
    exit_code, notes = run_script(tmp_path, line)
    assert exit_code == 0
    assert {noted: end.call for noted, end in notes.items()} == ({code: call} if code else {})


def test_timer_that_two_lines_set_in_turn_is_written_some_times(tmp_path: Path) -> None:
    line = """for _ in range(20):
        signal.alarm(60)
        signal.alarm(90)"""
    assert run_script(tmp_path, line) == (0, {})


def test_exit_of_a_rank_is_its_exception(tmp_path: Path) -> None:
    assert run_script(tmp_path, "import sys; sys.exit(3)") == (3, {})


def test_replaced_functions_can_be_pickled(tmp_path: Path) -> None:
    line = f"import pickle; open({str(tmp_path / 'function')!r}, 'wb').write(pickle.dumps(os._exit))"
    assert run_script(tmp_path, line) == (0, {})
    assert pickle.loads((tmp_path / "function").read_bytes()) is os._exit


def test_replaced_functions_behave_as_builtin_ones(tmp_path: Path) -> None:
    line = """import copy, inspect
    class Timer:
        alarm = signal.alarm
    assert Timer().alarm(0) == 0
    assert copy.deepcopy(os.kill) is os.kill
    assert str(inspect.signature(os.kill)) == "(pid, signal, /)"
    assert repr(os.kill) == "<built-in function kill>"
    for wrong in (lambda: os.kill("x", 1), lambda: os.kill(1), lambda: os.kill(pid=1, signal=0)):
        try:
            wrong()
        except TypeError:
            continue
        raise AssertionError"""
    assert run_script(tmp_path, line) == (0, {})


def test_exception_of_a_signal_handler_is_raised_while_a_call_is_noted(tmp_path: Path) -> None:
    line = """import json, _signal
    def give_up(*_):
        raise ValueError
    signal.signal(signal.SIGUSR1, give_up)
    json.dump = lambda *_: _signal.raise_signal(signal.SIGUSR1)
    try:
        signal.alarm(60)
    except ValueError:
        raise SystemExit(5)"""
    assert run_script(tmp_path, line) == (5, {})


def test_fault_of_a_note_does_not_reach_the_script(tmp_path: Path) -> None:
    (tmp_path / "notes.json").mkdir()
    assert run_script(tmp_path, "os._exit(4)") == (4, {})


@pytest.mark.parametrize(
    ("code", "call", "is_timer", "category", "exit_code"),
    [
        (-signal.SIGKILL, "os.kill()", False, "Killed", EXIT_RETRYABLE),
        (-signal.SIGTERM, "os.kill()", False, "Killed", EXIT_RETRYABLE),
        (4, "os._exit()", False, "UserError", EXIT_RETRYABLE),
        (-signal.SIGPROF, "signal.setitimer()", True, "UserError", EXIT_USER_ERROR),
        (-signal.SIGALRM, "signal.alarm()", True, "UserError", EXIT_RETRYABLE),
    ],
)
def test_own_end_is_explained_with_its_place(
    tmp_path: Path, code: int, call: str, is_timer: bool, category: str, exit_code: int
) -> None:
    pod = launcher_pod(tmp_path)
    for name in ("workers", "output"):
        (tmp_path / name).mkdir(exist_ok=True)
    worker = {"pid": 7, "rank": 0, "localRank": 0, "restart": 0, "started": 100.0, "kind": "script"}
    write_json(str(tmp_path / "workers/0.json"), worker)
    noted = OwnEnd(7, call, "stop (train.py:4)", is_timer)
    shell_code = code if code > 0 else 128 - code
    write_json(note_path(pod.runtime, 0, OWN_END), {str(shell_code): noted})
    failure = examine_worker(pod, WorkerEnd(code, time=110.0))
    assert (failure.category, failure.container_exit_code) == (category, exit_code)
    assert "stop (train.py:4)" in failure.message
    assert call in failure.message
    if category == "UserError":
        assert failure.signature == f"{call} at stop (train.py:4)"

    write_json(note_path(pod.runtime, 0, OWN_END), {str(shell_code): noted._replace(pid=8)})
    assert "train.py" not in examine_worker(pod, WorkerEnd(code, time=110.0)).message, "another process's"


@pytest.mark.parametrize(
    ("child", "codes", "is_named"), [(None, [6], True), (["a", 6], [6, 7], True), (None, [6, 7], False)]
)
def test_helper_that_ends_itself_is_named_with_its_place(
    tmp_path: Path, child: list[object] | None, codes: list[int], is_named: bool
) -> None:
    pod = launcher_pod(tmp_path)
    for name in ("workers", "output", "errors"):
        (tmp_path / name).mkdir(exist_ok=True)
    write_json(str(tmp_path / "workers/0.json"), {"pid": 7, "rank": 0, "localRank": 0, "restart": 0})
    notes = {str(code): OwnEnd(8, "os._exit()", "work (train.py:9)", is_timer=False) for code in codes}
    write_json(note_path(pod.runtime, 0, OWN_END), notes)
    error = {
        "type": "concurrent.futures.process.BrokenProcessPool",
        "message": "A process in the process pool ended",
        "child": child,
    }
    write_json(str(tmp_path / "errors/0.json"), {**error, "exitCode": 1})
    failure = examine_worker(pod, WorkerEnd(1))
    assert ("by os._exit() at work (train.py:9)" in failure.message) is is_named
    assert ("find out why work (train.py:9)" in failure.remedy) is is_named
    assert failure.signature == HELPER_ENDED
