"""What the launcher makes of a failed worker: its category, whether it is secondary, one line about it, and a hint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.launcher.contract import EXIT_RETRYABLE
from ddp_operator.launcher.failure import (
    add_last_lines,
    blame_early_ends,
    build_signature,
    classify,
    describe_failure,
    ended_silently,
    examine,
    examine_agent,
    find_root_cause,
    unwrap,
)
from ddp_operator.launcher.failure_table import Outcome
from ddp_operator.launcher.hints import advise
from ddp_operator.launcher.restarts import Recurrence
from ddp_operator.launcher.tracebacks import find_exceptions, fold_libraries, record_exception
from tests.support.launcher_config import launcher_pod

GLOO = "[pair.cc:553] Connection closed by peer [10.0.0.1]:2456. gloo/transport/tcp"


@pytest.mark.parametrize(
    ("code", "kind", "message", "expected"),
    [
        (1, "ValueError", "boom", Outcome("UserError", 82)),
        (1, "ModuleNotFoundError", "No module named 'x'", Outcome("UserError", 81)),
        (1, "SyntaxError", "invalid syntax", Outcome("UserError", 81)),
        (1, "SystemExit", "python: No module named x", Outcome("UserError", 81)),
        (2, "SystemExit", "2", Outcome("UserError", 81)),
        (1, "RuntimeError", GLOO, Outcome("Network", 86, True)),
        (1, "torch.distributed.DistNetworkError", "failed to recv, got 0 bytes", Outcome("Network", 86, True)),
        (
            1,
            "torch.distributed.DistNetworkError",
            "port: 29500, EADDRINUSE, address already in use",
            Outcome("Network", 82),
        ),
        (1, "torch.distributed.DistBackendError", "NCCL error: remote process exited", Outcome("NCCL", 86, True)),
        (1, "torch.distributed.DistBackendError", "NCCL: Duplicate GPU detected", Outcome("NCCL", 82)),
        (1, "ConnectionResetError", "[Errno 104] Connection reset by peer", Outcome("UserError", 82)),
        (1, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate", Outcome("OOM", 84)),
        (1, "RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", Outcome("OOM", 84)),
        (1, "MemoryError", "", Outcome("OOM", 84)),
        (1, "RuntimeError", "CUDA error: device-side assert triggered", Outcome("CUDAError", 82)),
        (1, "torch.AcceleratorError", "CUDA error: an illegal memory access was encountered", Outcome("CUDAError", 82)),
        (1, "RuntimeError", "Triton Error [CUDA]: misaligned address", Outcome("CUDAError", 82)),
        (1, "RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Outcome("CUDAError", 82)),
        (
            1,
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Outcome("OOM", 84),
        ),
        (
            1,
            "RuntimeError",
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
            Outcome("UserError", 82),
        ),
        (
            1,
            "RuntimeError",
            "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
            Outcome("UserError", 82),
        ),
        (1, "RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'", Outcome("UserError", 82)),
        (1, "ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", Outcome("UserError", 81)),
        (1, "AssertionError", "Torch not compiled with CUDA enabled", Outcome("UserError", 81)),
        (1, "AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'", Outcome("UserError", 81)),
        (
            1,
            "RuntimeError",
            "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
            Outcome("UserError", 81),
        ),
        (1, "torch.AcceleratorError", "CUDA error: unspecified launch failure", Outcome("CUDAError", 82)),
        (1, "AssertionError", "for now i think we need CUDA for DDP", Outcome("UserError", 82)),
        (1, "AssertionError", "NCCL timed out? set a longer one", Outcome("UserError", 82)),
        (1, "SystemExit", "CUDA is not available", Outcome("UserError", 82)),
        (1, "SystemExit", "RuntimeError: CUDA error: device-side assert triggered", Outcome("CUDAError", 82)),
        (1, "SystemExit", f"RuntimeError: {GLOO}", Outcome("Network", 86, True)),
        (-9, "", "", Outcome("Killed", 82)),
        (137, "", "", Outcome("Killed", 82)),
        (-15, "", "", Outcome("Killed", 82)),
        (-11, "", "", Outcome("Unknown", 82)),
        (1, "", "", Outcome("Unknown", 82)),
        (81, "", "", Outcome("UserError", 81)),
        (83, "", "", Outcome("Hang", 83)),
        (84, "SystemExit", "84", Outcome("OOM", 84)),
        (85, "", "", Outcome("Preempted", 85)),
        (86, "", "", Outcome("Network", 86, True)),
    ],
)
def test_the_outcome_of_a_worker(code: int, kind: str, message: str, expected: Outcome) -> None:
    assert classify(code, kind, message, oom_killed=False, non_retryable=[2]) == expected


@pytest.mark.parametrize(
    ("code", "kind", "message", "remedy"),
    [
        (1, "ValueError", "boom", "fix the line of the script"),
        (1, "ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "backend gloo"),
        (1, "RuntimeError", "CUDA error: invalid device ordinal", "LOCAL_RANK"),
        (1, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "the GPU's memory is full"),
        (1, "RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "the GPU's memory is full"),
        (1, "MemoryError", "", "raise the memory limit"),
        (1, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. ", "for memory"),
        (1, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Bus error. ", "spec.shm.sizeLimit"),
        (1, "torch.distributed.DistNetworkError", "port: 29500, EADDRINUSE", "no fixed port"),
        (1, "ModuleNotFoundError", "No module named 'einops'", "install it in the image"),
        (1, "RuntimeError", GLOO, "another rank went away first"),
        (1, "RuntimeError", "Distributed package doesn't have NCCL built in", "backend gloo"),
        (1, "AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'", "backend gloo"),
        (1, "RuntimeError", "Cannot access accelerator device when none is available.", "backend gloo"),
        (1, "RuntimeError", "Tried to instantiate dummy base class Event", "backend gloo"),
        (1, "RuntimeError", "torch.cuda.Stream requires CUDA support", "backend gloo"),
        (1, "RuntimeError", "Expected one of cpu, cuda device type at start of device string: None", "backend gloo"),
        (
            1,
            "ValueError",
            "device_id cuda:0 does not match the current compilation's accelerator support: None. Please",
            "backend gloo",
        ),
        (
            1,
            "ValueError",
            "DistributedDataParallel device_ids and output_device arguments only work with",
            "LOCAL_RANK",
        ),
        (3, "SystemExit", "3", "its last lines in the log"),
        (3, "SystemExit", "KeyError: 'lr'", "fix the line of the script"),
        (4, "", "", "its last lines in the log"),
        (-11, "", "", "native code"),
        (-9, "", "", "the kernel of a node that is short of memory"),
    ],
)
def test_the_hint_is_of_this_failure(code: int, kind: str, message: str, remedy: str) -> None:
    failed = {"type": kind, "message": message, "exitCode": code, "traceback": "Traceback" if kind else ""}
    found = classify(code, kind, message, oom_killed=False)
    assert remedy in advise({**failed, "outcome": found}, silent=ended_silently(failed))


def test_an_exception_that_torch_hands_on_is_told_by_its_last_line() -> None:
    message = "Caught KeyError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  File x\n"
    what = ("KeyError", "'no label' (in DataLoader worker process 1)")
    assert unwrap("KeyError", f"{message}KeyError: 'no label'\n") == what
    assert unwrap("KeyError", "Caught it") == ("KeyError", "Caught it")


def test_an_exception_of_a_spawned_process_is_its_own_and_not_torchs() -> None:
    message = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "/lib/torch/distributed/distributed_c10d.py", line 7, in wait\n    work.wait()\n    ^^^^^^^^^^^\n'
        "data.errors.Bad: 2 problems:\nfirst: timed out\n"
    )
    kind, said = unwrap("torch.multiprocessing.spawn.ProcessRaisedException", message)
    assert (kind, said) == ("data.errors.Bad", "2 problems:\nfirst: timed out (in Process 1)")
    assert classify(1, kind, said, oom_killed=False).category == "UserError"


def test_a_long_traceback_that_is_handed_on_keeps_its_last_line(tmp_path: Path) -> None:
    frames = "".join(f'  File "/lib/python3/x.py", line {n}, in call\n    return self.call()\n' for n in range(400))
    head = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    path = tmp_path / "0.json"
    error = OSError(f"{head}{frames}OSError: no img_17.jpg\n")
    record_exception(error, str(path), {"rank": 0, "localRank": 0, "restart": 0})
    record = json.loads(path.read_text())
    assert len(record["message"]) < 10_000
    what = ("OSError", "no img_17.jpg (in DataLoader worker process 1)")
    assert unwrap(record["type"], record["message"]) == what


@pytest.mark.parametrize(
    ("kind", "message", "traceback", "words"),
    [
        ("SystemExit", "3", "", "worker exited with code 3"),
        ("SystemExit", "no such option", "", "worker exited with code 3: no such option"),
        (
            "AssertionError",
            "",
            'File "/lib/a.py", line 2\n  File "/x/train.py", line 12',
            "AssertionError (train.py, line 12)",
        ),
        ("MemoryError", "", "", "MemoryError"),
        ("pkg.errors.Bad", "boom", "", "Bad: boom"),
    ],
)
def test_a_failed_worker_is_told_in_a_line(kind: str, message: str, traceback: str, words: str) -> None:
    failed = {"type": kind, "exitCode": 3, "message": message, "traceback": traceback}
    assert describe_failure(failed) == words


def leave(code: str) -> BaseException:
    with pytest.raises(SystemExit) as caught:
        exec(code, {})
    return caught.value


@pytest.mark.parametrize(
    ("code", "message", "last"),
    [
        ("import sys\ntry: {}['lr']\nexcept KeyError: sys.exit(3)", "KeyError: 'lr'", "KeyError: 'lr'"),
        ("import sys\ntry: assert 0\nexcept AssertionError: sys.exit(3)", "AssertionError", "AssertionError"),
        ("import sys\ntry: {}['lr']\nexcept KeyError: raise SystemExit(3) from None", "3", "SystemExit: 3"),
        ("import sys\ntry: {}['lr']\nexcept KeyError: sys.exit('give lr')", "give lr", "SystemExit: give lr"),
        ("import argparse\nargparse.ArgumentParser(prog='x').parse_args(['--lr'])",
         "x: error: unrecognized arguments: --lr", "SystemExit: 2"),
    ],
)  # fmt: skip
def test_a_script_that_ends_itself_by_a_number_had_a_reason(code: str, message: str, last: str, tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    record_exception(leave(code), str(path), {"rank": 0, "localRank": 0, "restart": 0})
    record = json.loads(path.read_text())
    assert (record["type"], record["message"]) == ("SystemExit", message)
    assert record["traceback"].splitlines()[-1] == last


def test_what_a_rank_had_said_counts_more_than_how_torchrun_ended_it(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "errors").mkdir()
    error = {"type": "OSError", "message": "truncated", "traceback": "T", "exitCode": 1}
    (tmp_path / "errors" / "0.json").write_text(json.dumps(error))
    ended = {"rank": 0, "localRank": 0, "exitCode": -15, "time": 1.0, "type": "", "message": "", "traceback": ""}
    assert examine(pod, ended)["exitCode"] == 1
    assert examine(pod, {**ended, "exitCode": -9})["exitCode"] == -9
    assert examine(pod, {**ended, "localRank": 1})["exitCode"] == -15


def test_a_rank_that_lost_peers_which_had_ended_well_is_not_called_a_network_failure() -> None:
    lost = {"rank": 1, "exitCode": 1, "type": "RuntimeError", "message": "Connection closed", "traceback": "T"}
    secondary = {**lost, "outcome": Outcome("NCCL", 86, True)}
    for ranks, pods, who in (([0], 0, "rank 0"), ([0, 2], 1, "ranks 0, 2"), ([], 1, "1 other pod"), ([], 2, "2 other")):
        blamed = blame_early_ends(secondary, ranks, pods)
        assert blamed["outcome"] == Outcome("UserError", 82)
        words = describe_failure(blamed)
        assert words.startswith(who)
        assert "had already ended, with exit code 0, when this rank" in words
        assert "none may leave the loop before the others" in blamed["remedy"]
    assert blame_early_ends(secondary, [], 0) is secondary
    own = {**lost, "outcome": Outcome("UserError", 82)}
    assert blame_early_ends(own, [0], 1) is own


@pytest.mark.parametrize(
    ("kind", "text", "outcome", "remedy"),
    [
        ("RendezvousTimeoutError", "", Outcome("Network", 86, True), "check that all pods of the job are scheduled"),
        ("PortTakenError", "cannot serve the rendezvous on port 1", Outcome("Unknown", 82), "spec.rendezvous.port"),
        ("PreflightError", "allreduce: NCCL error", Outcome("NCCL", 82), "another rank went away first"),
        ("ArgumentError", "torchrun refused its arguments", Outcome("UserError", 81), "torchrun's own message"),
        ("OSError", "EADDRINUSE", Outcome("Unknown", 82), "no fixed port"),
        ("ValueError", "torchrun failed", Outcome("Unknown", 82), ""),
    ],
)
def test_an_end_that_no_worker_caused_has_its_remedy(
    kind: str, text: str, outcome: Outcome, remedy: str, tmp_path: Path
) -> None:
    result = {"type": kind, "message": text}
    found = examine_agent(launcher_pod(tmp_path), result, 1)
    assert found[0] == outcome
    assert found[2] == "" if not remedy else remedy in found[2]
    assert remedy not in found[1] or not remedy


def test_sigkill_is_out_of_memory_only_where_the_kernel_says_so() -> None:
    assert classify(-9, "", "", oom_killed=True) == Outcome("OOM", 84)
    assert classify(137, "", "", oom_killed=True) == Outcome("OOM", 84)
    assert classify(-11, "", "", oom_killed=True).category == "Unknown"


def failure(
    rank: int, when: float, *, secondary: bool = False, code: int = 1, kind: str = "ValueError"
) -> dict[str, Any]:
    return {
        "rank": rank,
        "time": when,
        "exitCode": code,
        "type": kind,
        "outcome": Outcome("x", 82, secondary),
    }


def test_the_root_is_the_earliest_failure_that_explains_the_others() -> None:
    failures = [failure(0, 1, secondary=True), failure(1, 3), failure(2, 2), failure(3, 0, code=-15, kind="")]
    assert find_root_cause(failures)["rank"] == 2
    assert find_root_cause([failures[3], failures[0]])["rank"] == 0
    assert find_root_cause([failures[3]])["rank"] == 3


def frame(path: str, name: str) -> str:
    return f'  File "{path}", line 7, in {name}\n    {name}()\n    ^^^^^^\n'


def test_of_a_long_traceback_the_scripts_own_lines_are_kept() -> None:
    library = "/usr/lib/python3.11/site-packages/torch/nn.py"
    deep = "".join(frame(library, f"deep{number}") for number in range(9))
    head = "Traceback (most recent call last):\n"
    text = head + frame("/app/train.py", "main") + deep + frame("/app/model.py", "forward") + deep + "KeyError: 'lr'\n"
    folded = fold_libraries(text)
    assert folded.startswith(head + frame("/app/train.py", "main") + "  ... 9 calls inside libraries ...\n")
    end = frame("/app/model.py", "forward") + "  ... 7 calls inside libraries ...\n" + deep[-2 * len(deep) // 9 :]
    assert folded.endswith(end + "KeyError: 'lr'\n")


def test_calls_inside_libraries_are_folded_only_where_that_saves_lines() -> None:
    library = "/usr/lib/python3.11/site-packages/torch/nn.py"
    own = "".join(frame("/app/train.py", f"own{number}") for number in range(9))
    for calls, folded in ((1, False), (2, True)):
        inside = "".join(frame(library, f"deep{number}") for number in range(calls))
        text = "Traceback (most recent call last):\n" + inside + own + "KeyError: 'lr'\n"
        assert ("inside libraries" in fold_libraries(text)) is folded
        at_the_end = "Traceback (most recent call last):\n" + own + inside + "KeyError: 'lr'\n"
        assert fold_libraries(at_the_end) == at_the_end


def test_a_short_traceback_and_one_without_the_scripts_own_lines_stay_whole() -> None:
    short = (
        "Traceback (most recent call last):\n" + frame("/app/x.py", "main") + frame("/lib/python3.9/x.py", "f") + "E\n"
    )
    foreign = "".join(frame("/lib/python3/dist-packages/x.py", f"f{number}") for number in range(9)) + "E: x\n"
    assert fold_libraries(short) == short
    assert fold_libraries(foreign) == foreign
    assert fold_libraries("") == ""


TRACE = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/app/x.py", line 3, in <module>\n[rank1]:     f()\n'
)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (f"{TRACE}[rank1]: ValueError: bad label: 7", [("ValueError", "bad label: 7")]),
        (f"{TRACE}[rank1]: AssertionError\nbye", [("AssertionError", "")]),
        (f"{TRACE}[rank1]: A: 1\n{TRACE}[rank1]: B: 2\n{TRACE.replace('1]', '0]')}[rank0]: C", [("B", "2"), ("C", "")]),
        (TRACE, []),
        (f"{TRACE}[rank1]: and then all was well", []),
        ("ValueError: no traceback", []),
        ("", []),
    ],
)
def test_the_exceptions_are_found_in_the_last_lines_of_a_shell(lines: str, found: list[tuple[str, str]]) -> None:
    assert find_exceptions(lines) == found


def test_of_several_ranks_in_a_shell_a_secondary_failure_is_not_the_cause(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    text = f"{TRACE}[rank1]: RuntimeError: {GLOO}\n{TRACE.replace('1]', '0]')}[rank0]: ValueError: bad label\n"
    (tmp_path / "output" / "0.end").write_text(text)
    ended = {"rank": 0, "localRank": 0, "exitCode": 1, "time": 1.0, "type": "", "message": "", "traceback": ""}
    completed = add_last_lines(pod, examine(pod, ended))
    assert (describe_failure(completed), completed["outcome"].secondary) == (
        "ValueError: bad label",
        False,
    )


def test_a_shell_is_judged_by_the_traceback_in_its_last_lines(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text(f"{TRACE}[rank1]: RuntimeError: {GLOO}\n")
    ended = {"rank": 1, "localRank": 0, "exitCode": 1, "time": 1.0, "type": "", "message": "", "traceback": ""}
    completed = add_last_lines(pod, examine(pod, ended))
    assert completed["outcome"] == Outcome("Network", 86, True)
    assert describe_failure(completed) == f"RuntimeError: {GLOO}"
    assert completed["traceback"].endswith(GLOO)
    for other in ({"exitCode": 3}, {"exitCode": -9}, {"type": "SystemExit", "message": "1"}):
        failure = examine(pod, {**ended, **other})
        completed = add_last_lines(pod, failure)
        assert {**completed, "traceback": ""} == failure
        assert completed["traceback"].endswith(GLOO)


KEY_ERROR = (
    "Traceback (most recent call last):\n"
    '  File "/src/train.py", line 42, in <module>\n    main()\n'
    '  File "/src/data.py", line 7, in load\n    return table[key]\n'
    '  File "/usr/lib/python3.12/collections/__init__.py", line 1015, in __getitem__\n    raise KeyError(key)\n'
    "KeyError: 10\n"
)
CHAINED = f"{KEY_ERROR}\nDuring handling of the above exception, another exception occurred:\n\n" + (
    'Traceback (most recent call last):\n  File "/src/train.py", line 44, in <module>\n    raise Bad\n'
)


def failed(code: int = 1, kind: str = "", traceback: str = "", outcome: Outcome | None = None) -> dict[str, Any]:
    found = outcome or classify(code, kind, "words", oom_killed=False)
    return {"type": kind, "message": "words", "exitCode": code, "traceback": traceback, "outcome": found}


@pytest.mark.parametrize(
    ("failure", "signature"),
    [
        (failed(1, "KeyError", KEY_ERROR), "KeyError at data.py:7"),
        (failed(1, "pkg.errors.Bad", CHAINED), "Bad at train.py:44"),
        (failed(1, "SystemExit", KEY_ERROR), "SystemExit at data.py:7"),
        (failed(1, "torch.OutOfMemoryError", KEY_ERROR), "OutOfMemoryError at data.py:7"),
        (failed(1, "KeyError"), "KeyError"),
        (failed(3), "exit code 3"),
        (failed(-11), "SIGSEGV"),
        (failed(139), "SIGSEGV"),
        (failed(-9), ""),
        (failed(-6), ""),
        (failed(-15), ""),
        (failed(EXIT_RETRYABLE), ""),
        (failed(1, "RuntimeError", KEY_ERROR, Outcome("CUDAError", 82)), ""),
        (failed(1, "torch.distributed.DistBackendError", KEY_ERROR, Outcome("NCCL", 86, True)), ""),
        (failed(137, "Hang", KEY_ERROR, Outcome("Hang", 83)), ""),
    ],
)
def test_a_signature_is_what_repetitions_of_a_failure_of_the_script_share(
    failure: dict[str, Any], signature: str
) -> None:
    assert build_signature(failure) == signature


def test_the_innermost_place_is_a_librarys_where_none_is_the_scripts() -> None:
    trace = KEY_ERROR.replace("/src/", "/usr/lib/python3.12/site-packages/")
    assert build_signature(failed(1, "KeyError", trace)) == "KeyError at __init__.py:1015"


class TestRecurrence:
    @pytest.mark.parametrize(
        ("failures", "repeated"),
        [
            ([("A", 10, 9), ("A", 10, 9)], [False, True]),
            ([("A", 10, 9), ("A", 9, 9)], [False, True]),
            ([("A", 10, 9), ("A", 11, 9), ("A", 11, 9)], [False, False, True]),
            ([("A", 10, 9), ("B", 10, 9), ("A", 10, 9)], [False, False, True]),
            ([("A", 10, 9), ("", 20, 9), ("A", 15, 9)], [False, False, False]),
            ([("", 10, 9), ("", 10, 9)], [False, False]),
            ([("A", None, 9), ("A", None, 9)], [False, True]),
            ([("A", None, 9), ("A", None, 301)], [False, False]),
            ([("A", None, 400), ("A", None, 700), ("A", None, 730)], [False, False, True]),  # as late as before
            ([("A", None, 400), ("B", None, 700), ("A", None, 410)], [False, False, False]),
        ],
    )
    def test_is_the_same_signature_without_a_step_in_between(
        self, failures: list[tuple[str, float | None, float]], repeated: list[bool]
    ) -> None:
        recurrence = Recurrence()
        assert [recurrence.observe(*failure) for failure in failures] == repeated


@pytest.mark.parametrize(("devices", "code"), [(["null", "nvidiactl"], 81), (["nvidia0"], 82)])
def test_no_gpu_is_for_good_where_the_pod_was_given_none(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], code: int
) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: devices)
    outcome = classify(1, "RuntimeError", "No CUDA GPUs are available", oom_killed=False)
    assert outcome.exit_code == code


def test_a_signature_is_short_however_long_an_exceptions_name_is() -> None:
    seen = {"type": "E" * 500, "message": "", "traceback": "", "exitCode": 1, "outcome": Outcome("UserError", 82)}
    assert build_signature(seen) == "E" * 200
