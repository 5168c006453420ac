"""The kind of a failure by errno, type and words of its chain of exceptions; the rank records the chain."""

from __future__ import annotations

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

import pytest
import torch

from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.failure_table import Outcome
from ddp_pod.failures import volumes
from ddp_pod.failures.rules import WorkerEnd, classify
from ddp_pod.failures.text import find_advice
from ddp_pod.failures.worker_failure import add_last_lines, examine_worker
from ddp_pod.rank.tracebacks import find_exceptions, record_exception
from tests.support import ROOT
from tests.support.launcher_config import launcher_pod

ABOUT = {"rank": 0, "localRank": 0, "restart": 0}
SCRIPT = Outcome("UserError", 82)
FATAL = Outcome("UserError", 81)
MEMORY = Outcome("OOM", 84)
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/ckpt/step-4.pt")
REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize(
    ("text", "outcome", "remedy"),
    [
        ("OSError: [Errno 24] Too many open files: 'x'", SCRIPT, "file descriptor"),
        ("OSError: [Errno 23] Too many open files in system", SCRIPT, "file descriptor"),
        ("RuntimeError: received 0 items of ancdata", SCRIPT, "file descriptor"),
        (
            "RuntimeError: unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)",
            SCRIPT,
            "file descriptor",
        ),
        ("RuntimeError: unable to write to file </torch_4_1>: No space left on device (28)", SCRIPT, "shm.sizeLimit"),
        ("RuntimeError: unable to write to file </torch_4_1>: Kein Speicherplatz frei (28)", SCRIPT, "shm.sizeLimit"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", SCRIPT, "shm.sizeLimit"),
        ("OSError: [Errno 28] Kein Speicherplatz frei: '/ckpt/x'", SCRIPT, "the disk or volume is full"),
        ("safetensors_rust.SafetensorError: I/O error: (os error 28)", SCRIPT, "the disk or volume is full"),
        ("RuntimeError: [enforce fail at x.cc:672] . unexpected pos 640 vs 534", SCRIPT, "the disk or volume is full"),
        ("OSError: 2000000 requested and 131056 written", SCRIPT, "the disk or volume is full"),
        ("OSError: [Errno 27] File too large: '/ckpt/x'", SCRIPT, "ulimit -f"),
        (
            "ValueError: You set `devices=1` and `num_nodes=1` in Lightning, but the product (1 * 1) does not match "
            "the world size (2).",
            SCRIPT,
            "GROUP_WORLD_SIZE",
        ),
        ("RuntimeError: Mesh should not be bigger than default world size 2, but found 4 ranks!", SCRIPT, "--procs"),
        ("AssertionError: world size (6) is not divisible by tensor_parallel (4)", SCRIPT, "spec.procPerNode"),
        ("ValueError: environment variable WORLD_SIZE expected, but not set", SCRIPT, ""),
        ("ImportError: numpy.core.multiarray failed to import (auto-generated because", FATAL, "pin the version"),
        ("ValueError: numpy.dtype size changed, may indicate binary incompatibility.", FATAL, "pin the version"),
        ("shutil.Error: [('a', 'b', '[Errno 122] Disk quota exceeded')]", SCRIPT, "quota"),
        ("RuntimeError: . open file failed with strerror: Read-only file system", SCRIPT, "without readOnly"),
        ("OSError: [Errno 116] Stale file handle", SCRIPT, "storage"),
        ("OSError: [Errno 8] Exec format error: 'train.sh'", FATAL, "architecture"),
        ("OSError: [Errno 12] Cannot allocate memory", MEMORY, "memory limit"),
        ("RuntimeError: unable to mmap 9 bytes from file </x>: Cannot allocate memory (12)", MEMORY, "max_map_count"),
        ("MemoryError: ", MEMORY, "memory limit"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", SCRIPT, "podPidsLimit"),
        ("RuntimeError: can't start new thread", SCRIPT, "podPidsLimit"),
        ("BlockingIOError: [Errno 11] Unable to open file (unable to lock file, errno = 11)", SCRIPT, "the lock of"),
        ("FileExistsError: [Errno 17] File exists: 'out'", SCRIPT, "exist_ok=True"),
        ("ConnectionRefusedError: [Errno 111] Connection refused", SCRIPT, "request to a service"),
        ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='nccl'): timed out", SCRIPT, "request to a"),
        ("EOFError: EOF when reading a line", SCRIPT, "breakpoint()"),
        ("bdb.BdbQuit: ", SCRIPT, "breakpoint()"),
        ("EOFError: Ran out of input", SCRIPT, "incomplete"),
        ("_pickle.UnpicklingError: Weights only load failed. … Unsupported operand 60", SCRIPT, "incomplete"),
        (
            "_pickle.UnpicklingError: Weights only load failed. … Unsupported global: GLOBAL C",
            SCRIPT,
            "add_safe_globals",
        ),
        ("RuntimeError: PytorchStreamReader failed: failed finding central directory", SCRIPT, "incomplete"),
        ("RuntimeError: Error(s) in loading state_dict for Net:", SCRIPT, "another model"),
        ("ValueError: Default process group has not been initialized", SCRIPT, "init_process_group()"),
        ("RuntimeError: Expected to have finished reduction in the prior", SCRIPT, "find_unused_parameters"),
        ("AttributeError: Can't pickle local object 'main.<locals>.f'", SCRIPT, "pickled"),
        ("AttributeError: partially initialized module 'torch' has no attribute 'Tensor'", FATAL, "rename the file"),
        ("ImportError: cannot import name 'a' (most likely due to a circular import)", FATAL, "rename the file"),
        ("KeyError: 'getpwuid(): uid not found: 1000680000'", SCRIPT, "set USER"),
        ("OSError: No username set in the environment", SCRIPT, "set USER"),
        ("RuntimeError: [enforce fail at gloo/x.cc:84] Unable to find address for: eth9", FATAL, "GLOO_SOCKET_IFNAME"),
        (
            "torch.distributed.DistBackendError: NCCL error, internal error. Bootstrap : no socket interface found",
            FATAL,
            "NCCL_SOCKET_IFNAME",
        ),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, 131072", SCRIPT, "block sizes"),
        ("torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found", SCRIPT, "gcc"),
        ("torch._dynamo.exc.Unsupported: Failed to trace", SCRIPT, "fullgraph"),
        ("json.decoder.JSONDecodeError: Expecting value", SCRIPT, "JSON"),
        ("subprocess.CalledProcessError: Command 'x' died", SCRIPT, "own output"),
        ("KeyboardInterrupt: ", Outcome("Killed", 82), "SIGINT"),
        ("RuntimeError: Expected one of cpu, cuda at start of device string: gpu", SCRIPT, "cuda:N"),
        ("torch.AcceleratorError: CUDA error: device-side assert", Outcome("CUDAError", 82), "index out of range"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", SCRIPT, "helper process"),
        ("RuntimeError: CUDA is not available", SCRIPT, "the pod has no GPU"),
        ("std.bad_alloc: ", MEMORY, "memory limit"),
    ],
)
def test_text_of_exception_has_its_outcome_and_remedy(text: str, outcome: Outcome, remedy: str) -> None:
    kind, _, message = text.partition(": ")
    assert classify(WorkerEnd(1, kind, message), oom_killed=False) == outcome
    assert remedy in find_advice(text)


def raise_in_library(error: BaseException) -> None:
    exec(compile("raise error", "/x/site-packages/torch/x.py", "exec"), {"error": error})


def raise_in_script(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def chain(outer: BaseException, *causes: BaseException, handled: bool = False) -> Callable[[], None]:
    """Return a function that raises an exception with those that explain it, or were handled when it was raised."""

    def work() -> None:
        if not causes:
            raise_in_library(outer)
        try:
            chain(causes[0], *causes[1:], handled=handled)()
        except BaseException as cause:
            if handled:
                raise outer  # noqa: B904
            raise outer from cause

    return work


def examine(work: Callable[[], object], folder: Path) -> Failure:
    """Return the failure of a rank whose script does the work."""
    (folder / "errors").mkdir(exist_ok=True)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 a SystemExit is no Exception
        work()
    path = folder / "errors" / "0.json"
    path.unlink(missing_ok=True)
    record_exception(caught.value, str(path), ABOUT)
    return examine_worker(launcher_pod(folder), WorkerEnd(1))


STREAM = RuntimeError("basic_ios::clear: iostream error")
LOST = type("DistNetworkError", (RuntimeError,), {"__module__": "torch.distributed"})("Connection reset by peer")


@pytest.mark.parametrize(
    ("work", "outcome", "remedy", "cause"),
    [
        (chain(RuntimeError("cannot save"), NO_SPACE), SCRIPT, "volume is full", "(caused by OSError: [Errno 28] "),
        (chain(RuntimeError("unexpected"), STREAM, handled=True), SCRIPT, "volume is full", "basic_ios::clear"),
        (chain(UnboundLocalError("f"), NO_SPACE, handled=True), SCRIPT, "volume is full", "No space left"),
        (chain(KeyError("lr"), REFUSED, handled=True), SCRIPT, "fix the line", ""),
        (chain(RuntimeError("no tracker"), REFUSED, handled=True), SCRIPT, "request to a", "Connection refused"),
        (chain(SystemExit(1), ValueError("x"), NO_SPACE), SCRIPT, "volume is full", "No space left"),
        (chain(urllib.error.URLError(REFUSED)), SCRIPT, "request to a service", "Connection refused"),
        (chain(RuntimeError("x", MemoryError("all"))), MEMORY, "memory limit", "all"),
        (chain(RuntimeError("rank 1 ends"), LOST), Outcome("Network", 86, True), "earliest failure", "reset by peer"),
        (chain(type("Full", (OSError,), {})(errno.EDQUOT, "voll")), SCRIPT, "quota", ""),
        (chain(type("Much", (MemoryError,), {})("voll")), MEMORY, "memory limit", ""),
        (raise_in_script(KeyError("cuda out of memory, nccl timed out")), SCRIPT, "fix the line", ""),
        (raise_in_script(RuntimeError("nccl or gloo: connection closed by setting")), SCRIPT, "fix the line", ""),
        (
            raise_in_script(RuntimeError("[tcp/pair.cc:553] Connection closed by peer in gloo")),
            Outcome("Network", 86, True),
            "earliest failure",
            "",
        ),
        (raise_in_script(RuntimeError("CUDA error handling: pass --device")), SCRIPT, "fix the line", ""),
        (raise_in_script(ValueError("out of memory budget must be > 0")), SCRIPT, "fix the line", ""),
        (raise_in_script(ValueError("loss is nan")), SCRIPT, "learning rate", ""),
    ],
)  # fmt: skip
def test_chain_of_exceptions_decides_by_its_most_certain_evidence(
    work: Callable[[], object], outcome: Outcome, remedy: str, cause: str, tmp_path: Path
) -> None:
    failure = examine(work, tmp_path)
    assert failure.outcome == outcome
    assert remedy in failure.remedy
    assert cause in failure.message


def test_missing_environment_variable_has_its_remedy(tmp_path: Path) -> None:
    assert "set the variable in env" in examine(lambda: os.environ["DDP_NO_SUCH_VARIABLE"], tmp_path).remedy
    assert "set the variable in env" not in examine(lambda: {}["key"], tmp_path).remedy


def test_suppressed_exception_explains_nothing(tmp_path: Path) -> None:
    def work() -> None:
        try:
            raise NO_SPACE
        except OSError:
            raise ValueError("lr") from None

    assert "fix the line" in examine(work, tmp_path).remedy


def test_chain_in_output_of_program_is_read(tmp_path: Path) -> None:
    code = "try: raise OSError(28, 'voll', '/ckpt/x')\nexcept OSError: raise RuntimeError('cannot save')"
    script = tmp_path / "train.py"
    script.write_text(f"def main():\n    {code.replace(chr(10), chr(10) + '    ')}\nmain()\n")
    output = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True).stderr
    chains = find_exceptions(output)
    assert [(facts.types, facts.handled, facts.by_script) for facts in chains[0]] == [
        (("RuntimeError",), False, True),
        (("OSError",), True, True),
    ]
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text(output)
    completed = add_last_lines(launcher_pod(tmp_path), Failure(local_rank=0, exit_code=1))
    assert "volume is full" in completed.remedy


@pytest.mark.parametrize(
    "chain", [None, 3, "x", [3], [{}], [{"types": []}], [{"types": ["A"], "message": 3}], [{"b": 1}]]
)
def test_malformed_chain_in_error_file_is_ignored(chain: object, tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    error = {"type": "OSError", "message": "[Errno 28] voll: '/ckpt/x'", "traceback": "", "chain": chain}
    (tmp_path / "errors" / "0.json").write_text(json.dumps(error))
    assert "volume is full" in examine_worker(launcher_pod(tmp_path), WorkerEnd(1)).remedy


@pytest.mark.parametrize(
    ("path", "free", "inodes", "message", "remedy"),
    [
        ("", 0, 9, "the volume at /ckpt is full: tmpfs of 32 MiB", "the disk or volume is full"),
        ("", 0, 0, "the volume at /ckpt has too many files", "the disk or volume is full"),
        ("/ckpt/a/b.pt", 0, 9, "the volume at /ckpt is full", "the disk or volume is full"),
        ("/ckpt2/b.pt", 0, 9, "", "the disk or volume is full"),
        ("", 1 << 20, 9, "", "the disk or volume is full"),
    ],
)
def test_full_volume_is_named(
    path: str, free: int, inodes: int, message: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("x / nfs rw 0 0\nx /ro ext4 ro 0 0\nx /ckpt tmpfs rw,size=32m 0 0\n")
    monkeypatch.setattr(volumes, "_MOUNTS", str(mounts))
    status = os.statvfs_result((4096, 4096, 8192, free, free, 9, inodes, inodes, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    error = OSError(errno.ENOSPC, "No space left on device", *filter(None, [path]))
    failure = examine(chain(error), tmp_path)
    assert message in failure.message
    assert message or "volume at" not in failure.message
    assert remedy in failure.remedy
    mounts.write_text("x /dev/shm tmpfs rw 0 0\n")
    if not path and not free:
        assert "spec.shm.sizeLimit" in examine(chain(error), tmp_path).remedy


@pytest.mark.parametrize(("mount", "is_named"), [("file's", True), ("another", False)])
def test_write_without_a_reason_names_no_volume_but_that_of_its_file(
    mount: str, is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    mounts = tmp_path / "mounts"
    mounts.write_text(f"x {tmp_path if is_named else '/other'} tmpfs rw 0 0\n")
    monkeypatch.setattr(volumes, "_MOUNTS", str(mounts))
    full = os.statvfs_result((4096, 4096, 8192, 0, 0, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    failure = examine(save, tmp_path)
    assert ("the volume at" in failure.message) is is_named
    assert "a limit of file sizes (ulimit -f)" in failure.remedy


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
        record_exception(Interrupting(), str(tmp_path / "error.json"), ABOUT)
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "boom"
