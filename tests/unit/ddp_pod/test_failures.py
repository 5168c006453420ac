"""Failures in the pod: outcome, remedy, text and signature of a failed worker or agent, and the root cause."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ddp_pod.base.exceptions import ExceptionFacts, FailingCode
from ddp_pod.base.files import write_json
from ddp_pod.contract.failure_record import (
    EVIDENCE_ERROR,
    EVIDENCE_EXIT_CODE,
    EVIDENCE_STOPPED,
    EVIDENCE_TIMEOUT,
    Failure,
    RankEnd,
)
from ddp_pod.contract.failure_table import OOM, PREEMPTED, Outcome
from ddp_pod.contract.names import ENV_LOCAL_POD
from ddp_pod.contract.plan import CodeConfig, WatchdogConfig
from ddp_pod.contract.processes import count_oom_kills
from ddp_pod.failures import crashes
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
from ddp_pod.failures.kinds import HELPER
from ddp_pod.failures.rules import WorkerEnd, classify, judge
from ddp_pod.failures.text import (
    ARGUMENTS_REMEDY,
    advise,
    advise_on_output,
    advise_on_program,
    describe_worker_failure,
)
from ddp_pod.failures.worker_failure import (
    EndedPeers,
    add_last_lines,
    attribute_to_interruption,
    attribute_to_lost_master,
    build_interrupted_end,
    build_signature,
    examine_worker,
    find_root_cause,
    is_unexplained,
    shorten_mismatch,
    unwrap_helper_error,
)
from ddp_pod.torchrun.store import PortTakenError
from tests.support.launcher_config import launcher_pod

SCRIPT = Outcome("UserError", 82)
FATAL = Outcome("UserError", 81)
MEMORY = Outcome("OOM", 84)
CUDA = Outcome("CUDAError", 82)
LOST_PEER = Outcome("Network", 86, True)
KILLED = Outcome("Killed", 82)
UNKNOWN = Outcome("Unknown", 82)
GLOO = "[pair.cc:553] Connection closed by peer [10.0.0.1]:2456. gloo/transport/tcp"
PREAMBLE = "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 4"
MISMATCH = (
    "Detected mismatch between collectives on ranks. "
    "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST, TensorShape=[1000], "
    "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float, memory_format=(nullopt))), but "
    "Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[10], "
    "TensorDtypes=Float).Collectives differ in the following aspects: \t Op type"
)

EXCEPTIONS = {
    SCRIPT: [
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float", "use torch.autocast"),
        ("_pickle.UnpicklingError: Weights only load failed. … Unsupported operand 60", "incomplete"),
        ("ValueError: boom", "fix the line of the script"),
        ("ValueError: Expected more than 1 value per channel when training", "drop_last"),
        ("TimeoutError: no answer", "ended at its own limit"),
        ("RuntimeError: DataLoader timed out after 2 seconds", "raise its timeout"),
        ("_queue.Empty: ", "ended at its own limit"),
        ("ValueError: unknown loss: infonce", "fix the line of the script"),
        ("RuntimeError: Expected all tensors to be on the same device, cuda:0 and cpu!", "to one device"),
        (
            "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type should be the same",
            "to one device",
        ),
        ("RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'", "fix the line"),
        ("AssertionError: for now i think we need CUDA for DDP", "fix the line"),
        ("AssertionError: NCCL timed out? set a longer one", "set a longer one"),
        ("ValueError: environment variable WORLD_SIZE expected, but not set", "fix the line"),
        ("SystemExit: KeyError: 'lr'", "fix the line"),
        ("SystemExit: CUDA is not available", "the pod has no GPU"),
        ("RuntimeError: CUDA is not available", "the pod has no GPU"),
        ("OSError: [Errno 24] Too many open files: 'x'", "ulimit -n"),
        ("OSError: [Errno 23] Too many open files in system", "ulimit -n"),
        ("RuntimeError: received 0 items of ancdata", "ulimit -n"),
        ("RuntimeError: unable to open shared memory object </torch_1>: Too many open files (24)", "ulimit -n"),
        ("RuntimeError: unable to write to file </torch_4_1>: No space left on device (28)", "sharedMemory"),
        ("RuntimeError: unable to write to file </torch_4_1>: Kein Speicherplatz frei (28)", "sharedMemory"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "sharedMemory"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. ", "was killed"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", "helper process"),
        ("OSError: [Errno 28] No space left on device", "the disk or volume is full"),
        ("OSError: [Errno 28] Kein Speicherplatz frei: '/ckpt/x'", "the disk or volume is full"),
        ("safetensors_rust.SafetensorError: I/O error: (os error 28)", "the disk or volume is full"),
        ("RuntimeError: [enforce fail at x.cc:672] . unexpected pos 640 vs 534", "the disk or volume is full"),
        ("RuntimeError: basic_ios::clear: iostream error", "the disk or volume is full"),
        ("OSError: 2000000 requested and 131056 written", "the disk or volume is full"),
        ("OSError: [Errno 27] File too large: '/ckpt/x'", "ulimit -f"),
        ("shutil.Error: [('a', 'b', '[Errno 122] Disk quota exceeded')]", "quota"),
        ("RuntimeError: . open file failed with strerror: Read-only file system", "without readOnly"),
        ("OSError: [Errno 30] Read-only file system: '/data/last.pt'", "mounted without readOnly"),
        ("RuntimeError: [enforce fail] . open file failed with strerror: Permission denied", "fsGroup"),
        ("RuntimeError: File /ckpt/last.pt cannot be opened.", "fsGroup"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "podPidsLimit"),
        ("RuntimeError: can't start new thread", "podPidsLimit"),
        ("BlockingIOError: [Errno 11] Unable to open file (unable to lock file, errno = 11)", "in one rank"),
        ("FileExistsError: [Errno 17] File exists: 'out'", "exist_ok=True"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "request to a service"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", "request to a service"),
        ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='nccl'): timed out", "request to a"),
        ("EOFError: Ran out of input", "incomplete"),
        ("RuntimeError: PytorchStreamReader failed: failed finding central directory", "incomplete"),
        ("ValueError: the product (1 * 1) does not match the world size (2).", "GROUP_WORLD_SIZE"),
        ("RuntimeError: Mesh should not be bigger than default world size 2, but found 4 ranks!", "--procs"),
        ("AssertionError: world size (6) is not divisible by tensor_parallel (4)", "spec.procPerNode"),
        ("AttributeError: Can't pickle local object 'main.<locals>.f'", "top level"),
        ("KeyError: 'getpwuid(): uid not found: 1000680000'", "set USER"),
        ("OSError: No username set in the environment", "set USER"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, 131072", "fix the line"),
        ("torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found", "gcc"),
        ("torch._dynamo.exc.Unsupported: Failed to trace", "TORCHDYNAMO_DISABLE"),
        ("json.decoder.JSONDecodeError: Expecting value", "correct the JSON"),
        ("subprocess.CalledProcessError: Command 'x' died", "output above"),
        ("RuntimeError: Expected one of cpu, cuda at start of device string: gpu", "fix the line"),
        ("ValueError: DistributedDataParallel device_ids and output_device arguments only work with", "fix the line"),
        ("RuntimeError: operator torchvision::nms does not exist", "belong together"),
        ("FloatingPointError: Loss is nan, stopping training", "reduce the learning rate"),
        ("RuntimeError: Function 'SqrtBackward0' returned nan values in its 0th output.", "reduce the learning rate"),
        ("RuntimeError: The total norm for gradients is non-finite", "reduce the learning rate"),
        ("ValueError: the loss of step 3 on rank 0 is not a finite number", "reduce the learning rate"),
        (f"RuntimeError: {PREAMBLE}", "the same collectives"),
        (f"RuntimeError: {MISMATCH}", "the same collectives"),
    ],
    FATAL: [
        ("EOFError: EOF when reading a line", "breakpoint()"),
        ("bdb.BdbQuit: ", "breakpoint()"),
        (
            "RuntimeError: [1]: params[0] in this process with sizes [5, 8] appears not to match sizes of the same "
            "param in process 0.",
            "same model in every rank",
        ),
        ("RuntimeError: DDP expects same model across all ranks, but Rank 1 has 2 params", "same model in every rank"),
        ("OSError: [Errno 7] Argument list too long: 'true'", "128 KiB"),
        ("OSError: AF_UNIX path too long", "TMPDIR"),
        ("RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.", "under no_grad"),
        ("_pickle.UnpicklingError: Weights only load failed. … Unsupported global: C", "add_safe_globals"),
        ("RuntimeError: Error(s) in loading state_dict for Net:", "another model"),
        ("RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for w", "drop what differs"),
        ("ValueError: Default process group has not been initialized", "init_process_group()"),
        ("RuntimeError: Expected to have finished reduction in the prior", "find_unused_parameters"),
        ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", "without no_grad()"),
        ("ValueError: trying to initialize the default process group twice!", "once in each rank"),
        ("ModuleNotFoundError: No module named 'einops'", "install it in the image"),
        ("ModuleNotFoundError: No module named 'data.loader'", "data has no module loader: correct the name"),
        ("SyntaxError: invalid syntax", "fix the line"),
        ("SystemExit: python: No module named x", "the image lacks x"),
        ("ImportError: flash.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "belong together"),
        ("ImportError: numpy.core.multiarray failed to import (auto-generated because", "pin NumPy's version"),
        ("ValueError: numpy.dtype size changed, may indicate binary incompatibility.", "pin NumPy's version"),
        ("OSError: [Errno 8] Exec format error: 'train.sh'", "architecture"),
        ("AttributeError: partially initialized module 'torch' has no attribute 'Tensor'", "rename the file"),
        ("ImportError: cannot import name 'a' (most likely due to a circular import)", "rename the file"),
        ("RuntimeError: [enforce fail at gloo/x.cc:84] Unable to find address for: eth9", "GLOO_SOCKET_IFNAME"),
        ("torch.distributed.DistBackendError: NCCL error: no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "backend gloo"),
        ("AssertionError: Torch not compiled with CUDA enabled", "backend gloo"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "backend gloo"),
        ("RuntimeError: deserialize object on a CUDA device but torch.cuda.is_available() is False.", "backend gloo"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "backend gloo"),
        ("RuntimeError: Cannot access accelerator device when none is available.", "backend gloo"),
        ("RuntimeError: Tried to instantiate dummy base class Event", "backend gloo"),
        ("RuntimeError: torch.cuda.Stream requires CUDA support", "backend gloo"),
        ("RuntimeError: Expected one of cpu, cuda device type at start of device string: None", "backend gloo"),
        ("ValueError: device_id cuda:0 does not match the accelerator support: None. Please", "backend gloo"),
    ],
    MEMORY: [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "the GPU's memory is full"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "the GPU's memory is full"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "memory limit"),
        ("OSError: [Errno 12] Cannot allocate memory", "memory limit"),
        ("RuntimeError: unable to mmap 9 bytes from file </x>: Cannot allocate memory (12)", "max_map_count"),
        ("MemoryError: ", "raise the memory limit"),
        ("std.bad_alloc: ", "memory limit"),
    ],
    CUDA: [
        ("RuntimeError: CUDA error: device-side assert triggered", "beyond the vocabulary"),
        ("torch.AcceleratorError: CUDA error: device-side assert", "beyond the vocabulary"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "nvidia-smi"),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", "nvidia-smi"),
        ("RuntimeError: CUDA error: invalid device ordinal", "LOCAL_RANK"),
        ("RuntimeError: Triton Error [CUDA]: misaligned address", "nvidia-smi"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "nvidia-smi"),
        ("SystemExit: RuntimeError: CUDA error: device-side assert triggered", "beyond the vocabulary"),
    ],
    LOST_PEER: [
        (f"RuntimeError: {GLOO}", "another rank or the network failed first"),
        (f"SystemExit: RuntimeError: {GLOO}", "another rank or the network failed first"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "another rank"),
    ],
    Outcome("NodeFault", 82): [
        ("OSError: [Errno 116] Stale file handle", "storage"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "reset or replaced"),
    ],
    Outcome("Network", 82): [
        ("torch.distributed.DistNetworkError: port: 29500, EADDRINUSE, address already in use", "no fixed port")
    ],
    Outcome("NCCL", 86, True): [
        ("torch.distributed.DistBackendError: NCCL error: remote process exited", "another rank")
    ],
    Outcome("NCCL", 82): [("torch.distributed.DistBackendError: NCCL: Duplicate GPU detected", "another rank")],
    KILLED: [("KeyboardInterrupt: ", "SIGINT")],
}


def judged(code: int, kind: str = "", message: str = "", *, silent: bool = False) -> tuple[Outcome, str]:
    """Return the outcome and the remedy of a worker."""
    end = WorkerEnd(code, kind, message)
    judgement = judge(end, oom_killed=False, non_retryable=[5])
    return judgement.outcome, advise(judgement, end, only_exit_code=silent)


@pytest.mark.parametrize(
    ("outcome", "text", "remedy"),
    [(outcome, text, remedy) for outcome, rows in EXCEPTIONS.items() for text, remedy in rows],
)
def test_exception_has_its_outcome_and_remedy(
    outcome: Outcome, text: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_LOCAL_POD, raising=False)
    kind, _, message = text.partition(": ")
    found, advice = judged(1, kind, message)
    assert found == outcome
    assert remedy in advice


@pytest.mark.parametrize(
    ("code", "message", "silent", "outcome", "remedy"),
    [
        (-9, "", False, KILLED, "the kernel of a node short of memory"),
        (137, "", False, KILLED, "dmesg"),
        (-15, "", False, KILLED, "kubectl exec"),  # the kernel never sends it
        (130, "", False, KILLED, "kubectl exec"),
        (-11, "", True, UNKNOWN, "crashed in native code"),
        (139, "", True, UNKNOWN, "crashed in native code"),
        (-24, "", False, KILLED, "ulimit -t"),
        (153, "", False, KILLED, "ulimit -f"),
        (1, "", True, UNKNOWN, "the script ended itself"),
        (124, "", True, UNKNOWN, "the command timeout ends a program with 124"),
        (3, "3", True, SCRIPT, "its last lines in the log"),
        (5, "5", True, FATAL, "its last lines in the log"),  # spec.recovery.nonRetryableExitCodes
        (81, "", False, FATAL, "fix the line"),
        (83, "", False, Outcome("Hang", 83), "why the rank does not leave its line"),
        (84, "84", False, MEMORY, "lower the batch size"),
        (84, "84", True, MEMORY, "its last lines in the log"),
        (85, "", False, Outcome("Preempted", 85), ""),
        (86, "", False, LOST_PEER, "another rank"),
        (2, "train.py: error: unrecognized arguments: --epoch3 4", False, SCRIPT, ARGUMENTS_REMEDY),
        (2, "click.exceptions.NoSuchOption: No such option: --epoch3", False, SCRIPT, ARGUMENTS_REMEDY),
        (3, "train.py: error: unrecognized arguments: --epoch3 4", False, SCRIPT, "fix the line"),
        (2, "x.py: error: unrecognized arguments: --local-rank=0", False, SCRIPT, "'--local-rank', '--local_rank'"),
    ],
)
def test_exit_code_has_its_outcome_and_remedy(
    code: int, message: str, silent: bool, outcome: Outcome, remedy: str
) -> None:
    found, advice = judged(code, "SystemExit" if message else "", message, silent=silent)
    assert found == outcome
    assert remedy in advice


def test_sigkill_is_out_of_memory_only_if_the_kernel_has_counted_it() -> None:
    assert classify(WorkerEnd(-9), oom_killed=True) == MEMORY
    assert classify(WorkerEnd(137), oom_killed=True) == MEMORY
    assert classify(WorkerEnd(-11), oom_killed=True).category == "Unknown"


@pytest.mark.parametrize(("devices", "code"), [(["null", "nvidiactl"], 81), (["nvidia0"], 82)])
def test_missing_gpu_is_final_in_a_pod_without_one(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], code: int
) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: devices)
    assert judged(1, "RuntimeError", "No CUDA GPUs are available")[0].exit_code == code


PACKED = CodeConfig("/code", "0" * 64, "/workspace", None, "/packages")


@pytest.mark.parametrize(
    ("code", "local", "module", "script"),
    [
        (PACKED, False, "requirements.txt of the packed folder and add --pip", "--include PATH packs it"),
        (dataclasses.replace(PACKED, requirements="needs.txt"), False, "einops to needs.txt", "--include PATH"),
        (None, True, f"install the package of einops for {sys.executable}", "run ddp in the folder that has it"),
        (None, False, "the image lacks einops", "`ddp submit job.yaml --workdir DIR`"),
    ],
)
def test_missing_file_has_the_remedy_of_where_the_code_comes_from(
    code: CodeConfig | None, local: bool, module: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_LOCAL_POD, raising=False)
    if local:
        monkeypatch.setenv(ENV_LOCAL_POD, "uid")
    end = WorkerEnd(1, "ModuleNotFoundError", "No module named 'einops'")
    assert module in advise(judge(end, oom_killed=False), end, code=code)
    assert script in advise_on_program(code)


# ---- texts


def test_error_of_a_helper_process_is_unwrapped() -> None:
    message = "Caught KeyError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  File x\n"
    expected = ("KeyError", "'no label' (in DataLoader worker process 1)")
    assert unwrap_helper_error("KeyError", f"{message}KeyError: 'no label'\n") == expected
    assert unwrap_helper_error("KeyError", "Caught it") == ("KeyError", "Caught it")

    spawned = (
        "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "/lib/torch/distributed/distributed_c10d.py", line 7, in wait\n    work.wait()\n    ^^^^^^^^^^^\n'
        "data.errors.Bad: 2 problems:\nfirst: timed out\n"
    )
    kind, text = unwrap_helper_error("torch.multiprocessing.spawn.ProcessRaisedException", spawned)
    assert (kind, text) == ("data.errors.Bad", "2 problems:\nfirst: timed out (in Process 1)")
    assert judged(1, kind, text)[0].category == "UserError"


def test_ranks_in_different_collectives_are_named_with_them() -> None:
    expected = "rank 1 is in BROADCAST of shape [1000], rank 0 is in ALLREDUCE of shape [10]"
    assert shorten_mismatch(MISMATCH).endswith(expected)
    for other in ("boom", PREAMBLE, "Detected mismatch between collectives on ranks"):
        assert shorten_mismatch(other) == other


@pytest.mark.parametrize(
    ("kind", "message", "traceback", "text"),
    [
        ("SystemExit", "3", "", "worker exited with code 3"),
        ("SystemExit", "no such option", "", "worker exited with code 3: no such option"),
        ("AssertionError", "", 'File "/a.py", line 2\n  File "/x/t.py", line 12', "AssertionError (t.py, line 12)"),
        ("MemoryError", "", "", "MemoryError"),
        ("pkg.errors.Bad", "boom", "", "Bad: boom"),
    ],
)
def test_failure_of_a_worker_is_described_in_a_line(kind: str, message: str, traceback: str, text: str) -> None:
    assert describe_worker_failure(3, kind, message, traceback) == text


# ---- evidence


def test_error_file_counts_more_than_the_signal_of_the_agent(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    (tmp_path / "errors").mkdir()
    error = {"type": "OSError", "message": "truncated", "traceback": "T", "exitCode": 1}
    (tmp_path / "errors" / "0.json").write_text(json.dumps(error))
    assert examine_worker(pod, WorkerEnd(-15)).exit_code == 1
    assert examine_worker(pod, WorkerEnd(-9)).exit_code == 1
    assert examine_worker(pod, WorkerEnd(-11)).exit_code == 139
    stopped = examine_worker(pod, WorkerEnd(-15, local_rank=1, stopped=True))
    assert (stopped.exit_code, stopped.evidence) == (143, EVIDENCE_STOPPED)


@pytest.mark.parametrize(
    ("end", "evidence"),
    [
        (WorkerEnd(3), EVIDENCE_EXIT_CODE),
        (WorkerEnd(3, "SystemExit", "3"), EVIDENCE_EXIT_CODE),
        (WorkerEnd(3, "SystemExit", "no data"), EVIDENCE_ERROR),
        (WorkerEnd(1, "ValueError"), EVIDENCE_ERROR),
        (WorkerEnd(-9), EVIDENCE_ERROR),
        (WorkerEnd(143), EVIDENCE_ERROR),
        (WorkerEnd(-15, stopped=True), EVIDENCE_STOPPED),
        (WorkerEnd(1, stopped=True), EVIDENCE_STOPPED),
        (WorkerEnd(-15, "ValueError", "boom", stopped=True), EVIDENCE_ERROR),
        (WorkerEnd(1, "RuntimeError", GLOO), EVIDENCE_ERROR),
        (WorkerEnd(1, "RuntimeError", "[gloo/x.cc:1] Timed out waiting 25000ms for recv"), EVIDENCE_TIMEOUT),
        (WorkerEnd(1, "RuntimeError", "the reader timed out"), EVIDENCE_ERROR),
    ],
)
def test_failure_records_its_evidence(end: WorkerEnd, evidence: str, tmp_path: Path) -> None:
    assert examine_worker(launcher_pod(tmp_path), end).evidence == evidence


@pytest.mark.parametrize(
    ("peers", "text", "local_rank"),
    [
        (EndedPeers(RankEnd(0, pod=0), total=1), "", 0),
        (
            EndedPeers(RankEnd(9, 25.0, pod=9, line="bad record, giving up: 'caption'"), 2, 2),
            " after step 25 and the last line \"bad record, giving up: 'caption'\" (and 1 more)",
            None,
        ),
    ],
)
def test_failure_after_a_peer_that_ended_with_0_is_that_peers(
    tmp_path: Path, peers: EndedPeers, text: str, local_rank: int | None
) -> None:
    pod = launcher_pod(tmp_path)
    assert peers.first is not None
    lost = WorkerEnd(1, "RuntimeError", GLOO, traceback="T", rank=1)
    failure = examine_worker(pod, lost, peers)
    assert failure.outcome == SCRIPT
    place = (failure.rank, failure.local_rank, failure.pod_index, failure.exit_code)
    assert place == (peers.first.rank, local_rank, peers.first.pod, 0)
    end = f"rank {peers.first.rank} had already ended, with exit code 0{text}"
    assert failure.message == f"{end}, when rank 1 still needed it: RuntimeError: {GLOO}"
    assert "no rank may leave the loop before its peers" in failure.remedy
    assert examine_worker(pod, lost, EndedPeers()).outcome == LOST_PEER
    own = WorkerEnd(1, "ValueError", "boom")
    assert examine_worker(pod, own, peers) == examine_worker(pod, own)


@pytest.mark.parametrize(
    "end",
    [
        WorkerEnd(143, "SystemExit", "143"),
        WorkerEnd(81, "SystemExit", "81"),
        WorkerEnd(3),
        WorkerEnd(-signal.SIGSEGV),
        WorkerEnd(1, "train.Stopped", "on request"),
        WorkerEnd(1, "KeyboardInterrupt"),
    ],
)
def test_any_end_of_rank_after_stop_request_is_its_consequence(tmp_path: Path, end: WorkerEnd) -> None:
    own = examine_worker(launcher_pod(tmp_path), end)
    failure = attribute_to_interruption(own, "pod 1 was asked to stop")
    assert failure.outcome == Outcome(PREEMPTED.name, 85, True)
    assert failure.message == f"pod 1 was asked to stop: {own.message}"
    assert (failure.signature, failure.remedy, failure.exit_code) == ("", "", own.exit_code)


def test_lost_peer_and_fault_of_pod_remain_own_ends_after_stop_request(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    ends = (
        WorkerEnd(1, "RuntimeError", GLOO),
        WorkerEnd(1, "torch.OutOfMemoryError", "CUDA out of memory"),
        WorkerEnd(1, "torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
    )
    for end in ends:
        own = examine_worker(pod, end)
        assert attribute_to_interruption(own, "pod 1 was asked to stop") == own


def test_rank_that_exits_while_pod_0_is_lost_has_lost_it(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path, node=1)
    for end in (WorkerEnd(143, "SystemExit", "143"), WorkerEnd(3), WorkerEnd(-signal.SIGTERM)):
        failure = attribute_to_lost_master(examine_worker(pod, end))
        assert failure.outcome == LOST_PEER
        assert failure.message.startswith("pod 0 was lost: worker ")
    for end in (WorkerEnd(1, "ValueError", "boom"), WorkerEnd(-signal.SIGSEGV), WorkerEnd(-signal.SIGKILL)):
        own = examine_worker(pod, end)
        assert attribute_to_lost_master(own) == own


def test_ranks_that_exited_with_0_after_stop_request_are_interrupted(tmp_path: Path) -> None:
    failure = build_interrupted_end(launcher_pod(tmp_path, node=2), 4, "pod 1 was asked to stop")
    assert failure.outcome == Outcome(PREEMPTED.name, 85, True)
    assert (failure.pod_index, failure.exit_code, failure.rank, failure.local_rank) == (2, 0, 4, 0)
    assert failure.message == "pod 1 was asked to stop: all ranks of the pod exited with 0"


def test_root_cause_is_the_earliest_failure_that_explains_the_others() -> None:
    def failure(rank: int, when: float, *, secondary: bool = False, evidence: str = EVIDENCE_ERROR) -> Failure:
        return Failure("x", rank=rank, time=when, secondary=secondary, evidence=evidence)

    failures = [failure(0, 1, secondary=True), failure(1, 3), failure(2, 2), failure(3, 0, evidence=EVIDENCE_STOPPED)]
    assert find_root_cause(failures).rank == 2
    assert find_root_cause([failures[3], failures[0]]).rank == 0
    assert find_root_cause([failures[3]]).rank == 3


# ---- the last lines of a program


TRACE = (
    '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/app/x.py", line 3, in <module>\n[rank1]:     f()\n'
)


def complete(folder: Path, lines: str, failed: Failure | WorkerEnd) -> Failure:
    """Return a failure that is completed by the last lines of the rank's output."""
    pod = launcher_pod(folder)
    (folder / "output").mkdir(exist_ok=True)
    (folder / "output" / "0.end").write_text(lines)
    return add_last_lines(pod, examine_worker(pod, failed) if isinstance(failed, WorkerEnd) else failed)


def test_shell_is_judged_by_the_traceback_in_its_last_lines(tmp_path: Path) -> None:
    lines = f"{TRACE}[rank1]: RuntimeError: {GLOO}\n"
    ended = WorkerEnd(1, time=1.0, rank=1)
    completed = complete(tmp_path, lines, ended)
    assert completed.outcome == LOST_PEER
    assert completed.message == f"RuntimeError: {GLOO}"
    assert (completed.rank, completed.time) == (1, 1.0)
    assert completed.traceback.endswith(GLOO)
    for changes in ({"exit_code": 3}, {"exit_code": -9}, {"exception_type": "SystemExit", "message": "1"}):
        failed = examine_worker(launcher_pod(tmp_path), ended._replace(**changes))
        completed = complete(tmp_path, lines, failed)
        assert dataclasses.replace(completed, traceback="", message=failed.message) == failed
        assert completed.traceback.endswith(GLOO)
        is_silent = failed.evidence == EVIDENCE_EXIT_CODE
        assert ("; its last line: " in completed.message) is is_silent

    two = f"{lines}{TRACE.replace('1]', '0]')}[rank0]: ValueError: bad label\n"
    completed = complete(tmp_path, two, WorkerEnd(1, time=1.0))
    assert (completed.message, completed.secondary) == ("ValueError: bad label", False)


@pytest.mark.parametrize(("printed", "is_same"), [("bad label", True), ("bad image", False)])
def test_record_of_the_exception_that_a_shell_shows_completes_it(printed: str, is_same: bool, tmp_path: Path) -> None:
    facts = ExceptionFacts(("ValueError",), "bad label", failing=FailingCode(code="f()", check="x > 0"))
    error = {"type": "ValueError", "message": "bad label (3 of 2)", "chain": [facts._asdict()], "exitCode": 1}
    (tmp_path / "output").mkdir()
    write_json(str(tmp_path / "output" / "0.error"), error)
    lines = f"{TRACE}[rank1]: ValueError: {printed}\n"
    failed = examine_worker(launcher_pod(tmp_path), WorkerEnd(1, time=1.0))
    assert is_unexplained(launcher_pod(tmp_path), failed)
    completed = complete(tmp_path, lines, failed)
    assert completed.message == ("ValueError: bad label (3 of 2)" if is_same else "ValueError: bad image")
    assert ("meet what `f()` requires: x > 0" in completed.remedy) is is_same
    assert not is_unexplained(launcher_pod(tmp_path), completed)
    (tmp_path / "output" / "0.error").unlink()
    assert not is_unexplained(launcher_pod(tmp_path), failed)


TERMINATED = "terminate called after throwing an instance of "


@pytest.mark.parametrize(
    ("lines", "outcome", "message", "remedy"),
    [
        (f"{TERMINATED}'gloo::EnforceNotMet'\n  what():  {PREAMBLE}", SCRIPT, "EnforceNotMet: [", "same collectives"),
        (
            f"{TERMINATED}'c10::DistBackendError'\n  what():  [PG ID 0] Watchdog caught timeout: WorkNCCL(SeqNum=3)",
            Outcome("NCCL", 86, True),
            "DistBackendError: [PG ID 0] Watchdog",
            "look for the earliest failure",
        ),
        (f"{TERMINATED}'a::Error'\n  what():  bad\n" + "  File frame\n" * 40, SCRIPT, "Error: bad", "fix the line"),
        (f"{TERMINATED}'c10::Error'\n  what():  CUDA error: illegal access", CUDA, "Error: CUDA error", "nvidia-smi"),
        ("Fatal Python error: Bus error\n", UNKNOWN, "worker killed by SIGABRT", "crashed in native code"),
        ("step 3\n", UNKNOWN, "worker killed by SIGABRT", "crashed in native code"),
    ],
)
def test_native_crash_is_judged_by_exception_in_last_lines(
    lines: str, outcome: Outcome, message: str, remedy: str, tmp_path: Path
) -> None:
    completed = complete(tmp_path, lines, WorkerEnd(-6, time=1.0))
    assert completed.outcome == outcome
    assert completed.message.startswith(message)
    assert remedy in completed.remedy
    assert completed.exit_code == 134


@pytest.mark.parametrize(("after", "is_cause"), [("", True), ("epoch 2\n", False)])
def test_exit_after_the_exception_of_a_thread_is_explained_by_it(after: str, *, is_cause: bool, tmp_path: Path) -> None:
    lines = f"Exception in thread train:\n{TRACE.replace('[rank1]: ', '')}ValueError: bad label\n{after}"
    ended = WorkerEnd(1, time=1.0, rank=1, exception_type="SystemExit", message="1")
    completed = complete(tmp_path, lines, ended)
    assert (completed.message == "ValueError: bad label") is is_cause


def test_exit_code_that_a_program_has_chosen_counts_more_than_the_exception_of_a_thread(tmp_path: Path) -> None:
    lines = f"Exception in thread train:\n{TRACE.replace('[rank1]: ', '')}ValueError: bad label\n"
    completed = complete(tmp_path, lines, WorkerEnd(3, time=1.0, rank=1))
    assert completed.message == "worker exited with code 3; its last line: 'ValueError: bad label'"


def test_last_line_is_the_one_that_refuses_the_arguments(tmp_path: Path) -> None:
    completed = complete(tmp_path, f"{USAGE}make: *** [Makefile:8: train] Error 2\n", WorkerEnd(2))
    assert completed.message.endswith("its last line: 'train.py: error: unrecognized arguments: -x'")


USAGE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: -x\n"
NON_FINITE = "Loss is nan, stopping training\n"


@pytest.mark.parametrize(
    ("lines", "code", "remedy"),
    [
        (USAGE, 2, ARGUMENTS_REMEDY),
        (USAGE, 1, "the log"),
        (NON_FINITE, 3, "learning rate"),
        (NON_FINITE, 82, "the log"),  # chosen by the script
        (NON_FINITE, 137, "the log"),  # killed from outside
    ],
)
def test_last_lines_of_a_program_without_exception_have_a_remedy(
    lines: str, code: int, remedy: str, tmp_path: Path
) -> None:
    failed = Failure(local_rank=0, exit_code=code, remedy="the log")
    assert remedy in complete(tmp_path, lines, failed).remedy


@pytest.mark.parametrize(
    "text",
    [
        "mkdir: cannot create directory 'work': File exists",
        "fatal: destination path 'x' already exists and is not an empty directory.",
        "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 12 (apt-get)",
        "fatal: Unable to create '/x/.git/index.lock': File exists.",
        "mv: cannot move 'a' to 'b/a': Directory not empty",
    ],
)
def test_collision_of_commands_that_each_rank_runs_is_explained(text: str) -> None:
    assert "each of the pod's 4 ranks runs the container's command" in advise_on_output(text, 1, 4)
    assert "in each of" not in advise_on_output(text, 1, 1)


# ---- signatures

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
IN_LIBRARY = KEY_ERROR.replace("/src/", "/usr/lib/python3.12/site-packages/")


@pytest.mark.parametrize(
    ("end", "outcome", "signature"),
    [
        (WorkerEnd(1, "KeyError", "x", KEY_ERROR), None, "KeyError at data.py:7"),
        (WorkerEnd(1, "pkg.errors.Bad", "x", CHAINED), None, "Bad at train.py:44"),
        (WorkerEnd(1, "SystemExit", "x", KEY_ERROR), None, "SystemExit at data.py:7"),
        (WorkerEnd(1, "KeyError", "x", IN_LIBRARY), None, "KeyError at __init__.py:1015"),
        (WorkerEnd(1, "KeyError"), None, "KeyError"),
        (WorkerEnd(1, "E" * 500), None, "E" * 200),
        (WorkerEnd(3), None, "exit code 3"),
        (WorkerEnd(-11), None, "SIGSEGV"),
        (WorkerEnd(139), None, "SIGSEGV"),
        (WorkerEnd(-9), None, ""),
        (WorkerEnd(-1), None, "SIGHUP"),
        (WorkerEnd(-6), None, "SIGABRT"),
        (WorkerEnd(-3), None, "SIGQUIT"),
        (WorkerEnd(-37), None, "signal 37"),
        (WorkerEnd(-15), None, "SIGTERM"),
        (WorkerEnd(-15, stopped=True), None, ""),
        (WorkerEnd(82), None, ""),
        (WorkerEnd(1, "RuntimeError", "x", KEY_ERROR), CUDA, ""),
        (WorkerEnd(1, "RuntimeError", "x", KEY_ERROR), LOST_PEER, ""),
        (WorkerEnd(137, "Hang", "x", KEY_ERROR), Outcome("Hang", 83), ""),
        (WorkerEnd(137, "Hang", "x", place="load (data.py:7)"), Outcome("Hang", 83), "Hang in load (data.py:7)"),
        (WorkerEnd(137, "Hang", "x", place="load (data.py:7)"), Outcome("Hang", 83, True), ""),
    ],
)
def test_repetitions_of_a_failure_of_the_script_share_a_signature(
    end: WorkerEnd, outcome: Outcome | None, signature: str
) -> None:
    assert build_signature(end, outcome or classify(end, oom_killed=False)) == signature


# ---- the agent and the launcher's tasks


def torchs(name: str, message: str) -> Exception:
    """Return an exception of a type that torch defines."""
    error: Exception = type(name, (Exception,), {})(message)
    return error


AGENT_ERRORS = [
    (torchs("RendezvousTimeoutError", ""), LOST_PEER, "not all 1 pods joined", "all pods of the job are scheduled"),
    (torchs("RendezvousConnectionError", "gone"), LOST_PEER, "lost the rendezvous at", "earliest"),
    (torchs("DistNetworkError", "gone"), LOST_PEER, "lost the rendezvous at", "earliest"),
    (PortTakenError(1, "in use"), Outcome("Network", 82), "the rendezvous on port 1: in use", "spec.rendezvous.port"),
    (ArgumentError("--x"), FATAL, "torchrun refused its options: --x", "correct the flags"),
    (ModuleNotFoundError("No module named 'torch'"), FATAL, "cannot run torchrun", "has PyTorch"),
    (OSError("EADDRINUSE"), UNKNOWN, "torchrun failed: OSError: EADDRINUSE", "no fixed port"),
    (ValueError("bad"), UNKNOWN, "torchrun failed: ValueError: bad", ""),
]


@pytest.mark.parametrize(("error", "outcome", "message", "remedy"), AGENT_ERRORS)
def test_agent_error_has_its_outcome_message_and_remedy(
    error: Exception, outcome: Outcome, message: str, remedy: str, tmp_path: Path
) -> None:
    failure = examine_agent_error(launcher_pod(tmp_path), error)
    assert failure.outcome == outcome
    assert message in failure.message
    assert remedy in failure.remedy
    assert failure.exception_type == type(error).__name__
    assert type(error).__name__ in failure.traceback


def test_agent_exit_without_a_report_is_classified_by_its_status(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path, oom_kills=1 << 30)
    killed = examine_agent_exit(pod, -9)
    assert (killed.outcome, killed.message) == (KILLED, "torchrun's agent killed by SIGKILL")
    assert examine_agent_exit(pod, 1).outcome == UNKNOWN


@pytest.mark.parametrize(
    ("problem", "outcome", "remedy"),
    [
        (SUPERSEDED, LOST_PEER, "no action needed"),
        (UNUSABLE, FATAL, "secretRef"),
        (UNREACHABLE, Outcome("Network", 82), "secretRef"),
    ],
)
def test_store_problem_has_its_outcome_and_remedy(problem: str, outcome: Outcome, remedy: str, tmp_path: Path) -> None:
    failure = build_store_failure(launcher_pod(tmp_path), problem, "no bucket")
    assert (failure.outcome, failure.message, failure.exception_type) == (outcome, "no bucket", problem)
    assert remedy in failure.remedy


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("name does not resolve yet", "the cluster's DNS"),
        ("nothing listens there yet", "the log of pod 0"),
        ("", "NetworkPolicy"),
    ],
)
def test_absence_of_pod_0_is_a_lost_peer(problem: str, remedy: str, tmp_path: Path) -> None:
    failure = build_absence_failure(launcher_pod(tmp_path, master="train-1-0.train"), problem)
    assert (failure.outcome, failure.exception_type) == (LOST_PEER, MASTER_NOT_FOUND)
    assert "train-1-0.train" in failure.message
    assert remedy in failure.remedy


@pytest.mark.parametrize(("action", "code"), [("Restart", 83), ("Fail", 81)])
@pytest.mark.parametrize("secondary", [False, True])
def test_worker_killed_by_watchdog_is_hang(tmp_path: Path, action: str, code: int, secondary: bool) -> None:
    (tmp_path / "errors").mkdir()
    plan = WatchdogConfig(start_seconds=100, stall_seconds=10, checkpoint_seconds=50, action=action)
    pod = launcher_pod(tmp_path, nodes=2, oom_kills=count_oom_kills(), watchdog=plan)
    error = {"type": "Hang", "message": "no step for 10 s", "traceback": "Stack", "secondary": secondary}
    write_json(str(tmp_path / "errors" / "1.json"), error)
    examined = examine_worker(pod, WorkerEnd(-9, local_rank=1))
    assert (examined.outcome, examined.message) == (Outcome("Hang", code, secondary), "no step for 10 s")
    assert examine_worker(pod, WorkerEnd(83)).container_exit_code == code  # which the script has chosen


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() "
            "instead of torch.nn.Module.to() when moving module from meta to a different device.",
            "Please use torch.nn.Module.to_empty() instead of torch.nn.Module.to() when moving module from meta to a "
            "different device",
        ),
        (
            "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to "
            "DTensor before calling distributed operators!",
            "need to convert all torch.Tensor to DTensor before calling distributed operators",
        ),
        ("ValueError: no padding token\nYou should set pad_token. More text", "You should set pad_token"),
        ("ValueError: must be a list. For more details, please see https://a.b/c", ""),
        ("ValueError: no. Use a() here. To work around, use b(). Try c() too", "Use a() here; To work around, use b()"),
        ("ValueError: batch size 7 is used twice", ""),
        ("ValueError: Set of labels contains 3 unknown labels", ""),
        ("RuntimeError: worker failed: call stack follows with 3 frames", ""),
        ("ValueError: bad lr, did you know that this happens in 3 of 4 runs", ""),
        ("NameError: name 'foo' is not defined. Did you mean: 'fob'?", "Did you mean: 'fob'"),
        ("ValueError: bad mode: use a faster one, e.g. torch.compile. More", "use a faster one, e.g. torch.compile"),
        ("ValueError: " + "\n " * 500_000, ""),  # in linear time
    ],
)
def test_remedy_repeats_what_an_unknown_message_advises(text: str, advice: str) -> None:
    kind, _, message = text.partition(": ")
    _, remedy = judged(1, kind, message)
    expected = f"as the message says: {advice}" if advice else "fix the line of the script that the traceback points to"
    assert remedy == expected


@pytest.mark.parametrize("remedy", [OOM.remedy, crashes.SHARED_MEMORY_REMEDY, HELPER.remedy], ids=range(3))
def test_remedy_tells_the_memory_limit_of_the_container_from_a_gpus(remedy: str) -> None:
    assert re.search(r"container memory limit|memory limit of the trainer container", remedy)
