"""Failures in the pod: outcome, message, remedy and signature of a failed worker or agent, and the root cause."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from ddp_pod.contract.failure_record import EVIDENCE_ERROR, EVIDENCE_EXIT_CODE, EVIDENCE_STOPPED, Failure
from ddp_pod.contract.failure_table import Outcome
from ddp_pod.contract.names import EXIT_RETRYABLE
from ddp_pod.failures.agent_failure import (
    MASTER_NOT_FOUND,
    SUPERSEDED,
    UNREACHABLE,
    UNUSABLE,
    ArgumentError,
    build_absence_failure,
    build_store_failure,
    examine_agent_error,
    examine_agent_exit,
)
from ddp_pod.failures.restarts import Recurrence
from ddp_pod.failures.rules import WorkerEnd, classify
from ddp_pod.failures.text import describe_worker_failure
from ddp_pod.failures.worker_failure import (
    EndedPeers,
    add_last_lines,
    build_signature,
    examine_worker,
    find_root_cause,
    unwrap_helper_error,
)
from ddp_pod.network.preflight import PreflightError, PreflightReport
from ddp_pod.rank.tracebacks import find_exceptions, fold_libraries, record_exception
from ddp_pod.torchrun.store import PortTakenError
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
    assert classify(WorkerEnd(code, kind, message), oom_killed=False, non_retryable=[2]) == expected


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
        (1, "RuntimeError", GLOO, "another rank or the network failed first"),
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
        (2, "SystemExit", "train.py: error: unrecognized arguments: --local-rank=0", "'--local-rank', '--local_rank'"),
        (3, "SystemExit", "3", "its last lines in the log"),
        (3, "SystemExit", "KeyError: 'lr'", "fix the line of the script"),
        (4, "", "", "its last lines in the log"),
        (-11, "", "", "native code"),
        (-9, "", "", "the kernel of a node that is short of memory"),
    ],
)
def test_remedy_is_the_one_of_this_failure(code: int, kind: str, message: str, remedy: str, tmp_path: Path) -> None:
    end = WorkerEnd(code, kind, message, traceback="Traceback" if kind else "")
    assert remedy in examine_worker(launcher_pod(tmp_path, oom_kills=1 << 30), end).remedy


def test_an_exception_that_torch_hands_on_is_told_by_its_last_line() -> None:
    message = "Caught KeyError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  File x\n"
    what = ("KeyError", "'no label' (in DataLoader worker process 1)")
    assert unwrap_helper_error("KeyError", f"{message}KeyError: 'no label'\n") == what
    assert unwrap_helper_error("KeyError", "Caught it") == ("KeyError", "Caught it")


def test_an_exception_of_a_spawned_process_is_its_own_and_not_torchs() -> None:
    message = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "/lib/torch/distributed/distributed_c10d.py", line 7, in wait\n    work.wait()\n    ^^^^^^^^^^^\n'
        "data.errors.Bad: 2 problems:\nfirst: timed out\n"
    )
    kind, said = unwrap_helper_error("torch.multiprocessing.spawn.ProcessRaisedException", message)
    assert (kind, said) == ("data.errors.Bad", "2 problems:\nfirst: timed out (in Process 1)")
    assert classify(WorkerEnd(1, kind, said), oom_killed=False).category == "UserError"


def test_a_long_traceback_that_is_handed_on_keeps_its_last_line(tmp_path: Path) -> None:
    frames = "".join(f'  File "/lib/python3/x.py", line {n}, in call\n    return self.call()\n' for n in range(400))
    head = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    path = tmp_path / "0.json"
    error = OSError(f"{head}{frames}OSError: no img_17.jpg\n")
    record_exception(error, str(path), {"rank": 0, "localRank": 0, "restart": 0})
    record = json.loads(path.read_text())
    assert len(record["message"]) < 10_000
    what = ("OSError", "no img_17.jpg (in DataLoader worker process 1)")
    assert unwrap_helper_error(record["type"], record["message"]) == what


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
    assert describe_worker_failure(3, kind, message, traceback) == words


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
    assert examine_worker(pod, WorkerEnd(-15)).exit_code == 1
    assert examine_worker(pod, WorkerEnd(-9)).exit_code == 1
    assert examine_worker(pod, WorkerEnd(-11)).exit_code == 139
    stopped = examine_worker(pod, WorkerEnd(-15, local_rank=1, stopped=True))
    assert (stopped.exit_code, stopped.evidence) == (143, EVIDENCE_STOPPED)


def test_failure_after_peers_that_ended_with_0_is_the_scripts(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    lost = WorkerEnd(1, "RuntimeError", GLOO, traceback="T", rank=1)
    for ranks, pods, who in (([0], 0, "rank 0"), ([0, 2], 1, "ranks 0, 2"), ([], 1, "1 other pod"), ([], 2, "2 other")):
        failure = examine_worker(pod, lost, EndedPeers(ranks, pods))
        assert failure.outcome == Outcome("UserError", 82)
        assert failure.message.startswith(who)
        assert "had already ended, with exit code 0, when this rank" in failure.message
        assert failure.message.endswith(GLOO)
        assert "no rank may leave the loop before its peers" in failure.remedy
    assert examine_worker(pod, lost, EndedPeers()).outcome == Outcome("Network", 86, True)
    own = WorkerEnd(1, "ValueError", "boom")
    assert examine_worker(pod, own, EndedPeers([0], 1)) == examine_worker(pod, own)


def torchs(name: str, message: str) -> Exception:
    """Return an exception of a type that torch defines."""
    error: Exception = type(name, (Exception,), {})(message)
    return error


REPORT = PreflightReport(seconds={}, problems={}, transport="Socket")


@pytest.mark.parametrize(
    ("error", "outcome", "message", "remedy"),
    [
        (
            torchs("RendezvousTimeoutError", ""),
            Outcome("Network", 86, True),
            "not all 1 pods joined",
            "check that all pods of the job are scheduled",
        ),
        (
            torchs("RendezvousConnectionError", "gone"),
            Outcome("Network", 86, True),
            "lost the rendezvous at",
            "earliest",
        ),
        (torchs("DistNetworkError", "gone"), Outcome("Network", 86, True), "lost the rendezvous at", "earliest"),
        (
            PortTakenError(1, "in use"),
            Outcome("Network", 82),
            "cannot serve the rendezvous on port 1: in use",
            "spec.r",
        ),
        (
            PreflightError({"allreduce": "NCCL error"}, REPORT._replace(nccl_failed=True)),
            Outcome("NCCL", 82),
            "the preflight failed: allreduce: NCCL error",
            "another rank or the network failed first",
        ),
        (
            PreflightError({"tcp": "no connection to nccl:1"}, REPORT),
            Outcome("Network", 82),
            "the preflight failed: tcp: no connection to nccl:1",
            "another rank or the network failed first",
        ),
        (
            PreflightError({"transport": "traffic uses Socket", "pairs": "slow"}, REPORT),
            Outcome("Network", 82),
            "the preflight failed: transport: traffic uses Socket; pairs: slow",
            "docs/scaling.md",
        ),
        (
            PreflightError({"transport": "not known"}, REPORT._replace(transport=None)),
            Outcome("NCCL", 82),
            "the preflight failed: transport: not known",
            "docs/scaling.md",
        ),
        (ArgumentError(), Outcome("UserError", 81), "torchrun refused its arguments", "torchrun's own message"),
        (
            ModuleNotFoundError("No module named 'torch'"),
            Outcome("UserError", 81),
            "cannot run torchrun",
            "has PyTorch",
        ),
        (OSError("EADDRINUSE"), Outcome("Unknown", 82), "torchrun failed: OSError: EADDRINUSE", "no fixed port"),
        (ValueError("bad"), Outcome("Unknown", 82), "torchrun failed: ValueError: bad", ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_agent_error_has_its_outcome_message_and_remedy(
    error: Exception, outcome: Outcome, message: str, remedy: str, tmp_path: Path
) -> None:
    failure = examine_agent_error(launcher_pod(tmp_path), error)
    assert failure.outcome == outcome
    assert message in failure.message
    assert failure.remedy == "" if not remedy else remedy in failure.remedy
    assert failure.exception_type == type(error).__name__
    assert type(error).__name__ in failure.traceback


def test_agent_exit_without_a_report_is_classified_by_its_status(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path, oom_kills=1 << 30)
    killed = examine_agent_exit(pod, -9)
    assert (killed.outcome, killed.message) == (Outcome("Killed", 82), "torchrun's agent killed by SIGKILL")
    ended = examine_agent_exit(pod, 1)
    assert (ended.outcome, ended.message) == (Outcome("Unknown", 82), "torchrun's agent exited with code 1")


@pytest.mark.parametrize(
    ("problem", "outcome", "remedy"),
    [
        (SUPERSEDED, Outcome("Network", 86, True), "no action needed"),
        (UNUSABLE, Outcome("UserError", 81), "secretRef"),
        (UNREACHABLE, Outcome("Network", 82), "secretRef"),
    ],
)
def test_store_problem_has_its_outcome_and_remedy(problem: str, outcome: Outcome, remedy: str, tmp_path: Path) -> None:
    failure = build_store_failure(launcher_pod(tmp_path), problem, "no bucket")
    assert (failure.outcome, failure.message, failure.exception_type) == (outcome, "no bucket", problem)
    assert remedy in failure.remedy


def test_absence_of_pod_0_is_a_lost_peer(tmp_path: Path) -> None:
    failure = build_absence_failure(launcher_pod(tmp_path), "nothing listens there yet")
    assert failure.outcome == Outcome("Network", 86, True)
    assert failure.exception_type == MASTER_NOT_FOUND


def test_sigkill_is_out_of_memory_only_where_the_kernel_says_so() -> None:
    assert classify(WorkerEnd(-9), oom_killed=True) == Outcome("OOM", 84)
    assert classify(WorkerEnd(137), oom_killed=True) == Outcome("OOM", 84)
    assert classify(WorkerEnd(-11), oom_killed=True).category == "Unknown"


def failure(rank: int, when: float, *, secondary: bool = False, evidence: str = EVIDENCE_ERROR) -> Failure:
    return Failure(rank=rank, time=when, category="x", container_exit_code=82, secondary=secondary, evidence=evidence)


def test_the_root_is_the_earliest_failure_that_explains_the_others() -> None:
    failures = [failure(0, 1, secondary=True), failure(1, 3), failure(2, 2), failure(3, 0, evidence=EVIDENCE_STOPPED)]
    assert find_root_cause(failures).rank == 2
    assert find_root_cause([failures[3], failures[0]]).rank == 0
    assert find_root_cause([failures[3]]).rank == 3


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
    chains = find_exceptions(lines)
    assert [(chain[0].types[0], chain[0].message) for chain in chains] == found


def test_of_several_ranks_in_a_shell_a_secondary_failure_is_not_the_cause(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    text = f"{TRACE}[rank1]: RuntimeError: {GLOO}\n{TRACE.replace('1]', '0]')}[rank0]: ValueError: bad label\n"
    (tmp_path / "output" / "0.end").write_text(text)
    completed = add_last_lines(pod, examine_worker(pod, WorkerEnd(1, time=1.0)))
    assert (completed.message, completed.secondary) == ("ValueError: bad label", False)


def test_a_shell_is_judged_by_the_traceback_in_its_last_lines(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text(f"{TRACE}[rank1]: RuntimeError: {GLOO}\n")
    ended = WorkerEnd(1, time=1.0, rank=1)
    completed = add_last_lines(pod, examine_worker(pod, ended))
    assert completed.outcome == Outcome("Network", 86, True)
    assert completed.message == f"RuntimeError: {GLOO}"
    assert (completed.rank, completed.time) == (1, 1.0)
    assert completed.traceback.endswith(GLOO)
    for changes in ({"exit_code": 3}, {"exit_code": -9}, {"exception_type": "SystemExit", "message": "1"}):
        failed = examine_worker(pod, ended._replace(**changes))
        completed = add_last_lines(pod, failed)
        assert dataclasses.replace(completed, traceback="") == failed
        assert completed.traceback.endswith(GLOO)


MISMATCHED = """step 3
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size
Fatal Python error: Aborted
  File "train.py", line 12 in <module>
"""


@pytest.mark.parametrize(
    ("lines", "outcome", "message", "remedy"),
    [
        (MISMATCHED, Outcome("UserError", 82), "EnforceNotMet: [enforce fail at gloo", "the same collectives"),
        (
            "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] Watchdog "
            "caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE) ran for 600 ms\n",
            Outcome("NCCL", 86, True),
            "DistBackendError: [PG ID 0] Watchdog",
            "look for the earliest failure",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory "
            "access was encountered\n",
            Outcome("CUDAError", 82),
            "Error: CUDA error",
            "nvidia-smi",
        ),
        ("Fatal Python error: Bus error\n", Outcome("Unknown", 82), "worker killed by SIGABRT", "/dev/shm is full"),
        ("step 3\n", Outcome("Unknown", 82), "worker killed by SIGABRT", "crashed in native code"),
    ],
)
def test_native_crash_is_judged_by_exception_in_last_lines(
    lines: str, outcome: Outcome, message: str, remedy: str, tmp_path: Path
) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text(lines)
    completed = add_last_lines(pod, examine_worker(pod, WorkerEnd(-6, time=1.0)))
    assert completed.outcome == outcome
    assert completed.message.startswith(message)
    assert remedy in completed.remedy
    assert completed.exit_code == 134


@pytest.mark.parametrize(
    ("end", "evidence"),
    [
        (WorkerEnd(3), EVIDENCE_EXIT_CODE),
        (WorkerEnd(3, "SystemExit", "3"), EVIDENCE_EXIT_CODE),
        (WorkerEnd(3, "SystemExit", "no data"), EVIDENCE_ERROR),
        (WorkerEnd(1, "ValueError"), EVIDENCE_ERROR),
        (WorkerEnd(-9), EVIDENCE_ERROR),
        (WorkerEnd(-15), EVIDENCE_ERROR),
        (WorkerEnd(-15, stopped=True), EVIDENCE_STOPPED),
        (WorkerEnd(1, stopped=True), EVIDENCE_STOPPED),
        (WorkerEnd(143), EVIDENCE_ERROR),
        (WorkerEnd(-15, "ValueError", "boom", stopped=True), EVIDENCE_ERROR),
    ],
)
def test_evidence_tells_what_a_failure_was_derived_from(end: WorkerEnd, evidence: str, tmp_path: Path) -> None:
    assert examine_worker(launcher_pod(tmp_path), end).evidence == evidence


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


def signature_of(code: int = 1, kind: str = "", traceback: str = "", outcome: Outcome | None = None) -> str:
    end = WorkerEnd(code, kind, "words", traceback)
    return build_signature(end, outcome or classify(end, oom_killed=False))


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (signature_of(1, "KeyError", KEY_ERROR), "KeyError at data.py:7"),
        (signature_of(1, "pkg.errors.Bad", CHAINED), "Bad at train.py:44"),
        (signature_of(1, "SystemExit", KEY_ERROR), "SystemExit at data.py:7"),
        (signature_of(1, "torch.OutOfMemoryError", KEY_ERROR), "OutOfMemoryError at data.py:7"),
        (signature_of(1, "KeyError"), "KeyError"),
        (signature_of(3), "exit code 3"),
        (signature_of(-11), "SIGSEGV"),
        (signature_of(139), "SIGSEGV"),
        (signature_of(-9), ""),
        (signature_of(-6), ""),
        (signature_of(-15), ""),
        (signature_of(EXIT_RETRYABLE), ""),
        (signature_of(1, "RuntimeError", KEY_ERROR, Outcome("CUDAError", 82)), ""),
        (signature_of(1, "torch.distributed.DistBackendError", KEY_ERROR, Outcome("NCCL", 86, True)), ""),
        (signature_of(137, "Hang", KEY_ERROR, Outcome("Hang", 83)), ""),
    ],
)
def test_a_signature_is_what_repetitions_of_a_failure_of_the_script_share(computed: str, expected: str) -> None:
    assert computed == expected


def test_the_innermost_place_is_a_librarys_where_none_is_the_scripts() -> None:
    trace = KEY_ERROR.replace("/src/", "/usr/lib/python3.12/site-packages/")
    assert signature_of(1, "KeyError", trace) == "KeyError at __init__.py:1015"


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

    @pytest.mark.parametrize(
        ("counts", "repeated"),
        [
            ([30, 30], [False, True]),
            ([30, 31], [False, True]),
            ([110, 20, 20], [False, False, True]),  # resumed from a checkpoint, at the same step
            ([0, 0], [False, True]),
        ],
    )
    def test_counted_steps_without_a_position_repeat_at_the_same_count(
        self, counts: list[int], repeated: list[bool]
    ) -> None:
        recurrence = Recurrence()
        assert [recurrence.observe("A", None, 400.0, count) for count in counts] == repeated


@pytest.mark.parametrize(("devices", "code"), [(["null", "nvidiactl"], 81), (["nvidia0"], 82)])
def test_no_gpu_is_for_good_where_the_pod_was_given_none(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], code: int
) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: devices)
    outcome = classify(WorkerEnd(1, "RuntimeError", "No CUDA GPUs are available"), oom_killed=False)
    assert outcome.exit_code == code


def test_a_signature_is_short_however_long_an_exceptions_name_is() -> None:
    end = WorkerEnd(1, "E" * 500)
    assert build_signature(end, Outcome("UserError", 82)) == "E" * 200
