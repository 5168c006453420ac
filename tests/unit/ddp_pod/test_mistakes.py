"""Failures that every attempt would repeat, from real exceptions, and those that another attempt may escape."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import runpy
import sqlite3
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Final

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

from ddp_pod.base.exceptions import ExceptionFacts, FailingCode
from ddp_pod.base.files import write_json
from ddp_pod.contract.failure_record import Failure, RankEnd
from ddp_pod.contract.names import EXIT_PEER_LOST, EXIT_RETRYABLE, EXIT_USER_ERROR
from ddp_pod.failures.kinds import UNKNOWN_KIND
from ddp_pod.failures.mistakes import recurs
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import HELPER_ENDED, EndedPeers, examine_worker
from ddp_pod.rank import lasting_files
from ddp_pod.rank.lasting_files import is_lasting_error
from ddp_pod.rank.tracebacks import record_exception
from tests.support.launcher_config import launcher_pod
from tests.support.rank_errors import ABOUT, catch, examine

HOUR: Final = 3600.0


def examine_later(work: Callable[[], object], folder: Path, about: Mapping[str, object] = ABOUT) -> Failure:
    """Return the failure of a rank that started in an hour, so that all files are older than it."""
    (folder / "errors").mkdir(exist_ok=True)
    record_exception(catch(work), str(folder / "errors" / "0.json"), {**about, "started": time.time() + HOUR})
    return examine_worker(launcher_pod(folder), WorkerEnd(1))


def assert_positive(value: float) -> None:
    assert value > 0, "the learning rate must be positive"


def assert_path(path: str) -> None:
    assert os.path.exists(path)


def assert_finite(loss: float) -> None:
    assert torch.isfinite(torch.tensor(loss))


def load_yaml(path: Path) -> object:
    with path.open() as file:
        return yaml.safe_load(file)


def refuse(status: int) -> None:
    raise urllib.error.HTTPError("http://store/data.bin", status, "refused", Message(), None)


def exit_if_large(rate: float) -> None:
    if rate > 0.01:
        sys.exit("the learning rate is above 0.01")


def exit_by_helper(rate: float) -> None:
    if rate > 0.01:
        print_and_exit("the learning rate is above 0.01")


def print_and_exit(text: str) -> None:
    print(text)
    sys.exit(text)


def exit_with_a_number(rate: float) -> None:
    if rate > 0.01:
        sys.exit(3)


def is_store_open() -> bool:
    return os.path.exists("/no/such/store")


def exit_without_answer(answer: Callable[[], bool]) -> None:
    if not answer():
        sys.exit("the store is closed")


def exit_late(began: float) -> None:
    if time.monotonic() - began > 0.0:
        sys.exit("over the budget")


def wrap(cause: Exception) -> None:
    try:
        raise cause
    except Exception as error:
        raise RuntimeError("cannot build batch 5") from error


def replace_cause(cause: Exception) -> None:
    try:
        raise cause
    except Exception:
        raise ValueError("batch 5") from None


def fail_in_handler() -> None:
    try:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    except OSError:
        undefined  # type: ignore[name-defined]  # noqa: B018, F821


def unscale_twice() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def step_without_gradients() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)


async def run_loop_in_loop() -> None:
    coroutine = asyncio.sleep(0)
    try:
        asyncio.run(coroutine)
    finally:
        coroutine.close()


def exit_after_mistake() -> None:
    try:
        {}["lr"]
    except KeyError:
        sys.exit(3)


def set_start_method_late() -> None:
    multiprocessing.get_start_method()  # from then on it is set, if no other test has done so
    multiprocessing.set_start_method("spawn")


@pytest.mark.parametrize(
    "work",
    [
        lambda: {}["label"],
        lambda: list(range(2))[3],
        lambda: None.shape,  # type: ignore[attr-defined]
        lambda: len(3),  # type: ignore[arg-type]
        lambda: float("NA"),
        lambda: 1 / 0,
        lambda: os.environ["DDP_NO_SUCH_VARIABLE"],
        lambda: torch.randn(16, 9) @ torch.randn(8, 4),
        lambda: torch.zeros(3) + torch.zeros(4),
        lambda: nn.Conv2d(3, 8, 1)(torch.zeros(1, 4, 8, 8)),
        lambda: nn.BatchNorm1d(4)(torch.zeros(1, 4)),
        lambda: nn.Linear(8, 4)(torch.zeros(2, 8, dtype=torch.float64)),
        lambda: nn.functional.cross_entropy(torch.zeros(1, 3), torch.tensor([5])),
        lambda: torch.zeros(2, requires_grad=True).add_(1),
        lambda: b"caf\xe9 au lait".decode(),
        lambda: torch.optim.SGD([torch.zeros(1)], lr=0.1).load_state_dict({"param_groups": [], "state": {}}),
        unscale_twice,
        lambda: next(iter(DataLoader([torch.zeros(8), torch.zeros(9)], batch_size=2, num_workers=1))),
        lambda: multiprocessing.get_context("spawn").Process(target=lambda: None).start(),
        step_without_gradients,
        lambda: nn.parallel.DistributedDataParallel(nn.ReLU()),
        set_start_method_late,
        lambda: asyncio.run(run_loop_in_loop()),
        lambda: torch.einsum("ij->z", torch.ones(2, 2)),
        lambda: assert_positive(-1),
        lambda: wrap(KeyError("token")),
        lambda: replace_cause(KeyError("token")),
        exit_after_mistake,
        lambda: exit_if_large(0.1),
        lambda: exit_by_helper(0.1),
        lambda: vars(runpy)["_run_module_as_main"]("os.main", False),
    ],
)
def test_mistake_ends_the_job_at_once(work: Callable[[], object], tmp_path: Path) -> None:
    failure = examine(work, tmp_path)
    assert failure.outcome.exit_code == 81, failure.message


@pytest.mark.parametrize(
    "work",
    [
        lambda: urllib.request.urlopen("http://127.0.0.1:9/"),
        lambda: refuse(403),
        lambda: refuse(503),
        lambda: wrap(TimeoutError("no answer")),
        lambda: wrap(OSError(errno.ENOSPC, "No space left on device")),
        lambda: replace_cause(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")),
        lambda: subprocess.run([sys.executable, "-c", "exit(3)"], check=True),
        lambda: b"caf\xc3".decode(),
        lambda: assert_path("/no/such/folder"),
        lambda: assert_finite(float("nan")),
        lambda: sys.exit("the feature store does not answer"),
        lambda: (_ for _ in ()).throw(RuntimeError("the feature store does not answer")),
        fail_in_handler,
        lambda: exit_with_a_number(0.1),
        lambda: exit_without_answer(is_store_open),
        lambda: exit_late(time.monotonic()),
    ],
)
def test_failure_with_a_cause_outside_is_not_final(work: Callable[[], object], tmp_path: Path) -> None:
    failure = examine(work, tmp_path)
    assert failure.outcome.exit_code != 81, failure.message


@pytest.mark.parametrize("work", [exit_if_large, exit_by_helper])
def test_condition_of_an_exit_is_in_the_remedy(work: Callable[[float], None], tmp_path: Path) -> None:
    failure = examine(lambda: work(0.1), tmp_path)
    assert failure.remedy.endswith("what it refuses: rate > 0.01 (rate: 0.1)")
    assert "refuses" not in examine(lambda: exit_with_a_number(0.1), tmp_path).remedy


def test_module_that_cannot_run_is_a_matter_of_the_command(tmp_path: Path) -> None:
    failure = examine(lambda: vars(runpy)["_run_module_as_main"]("os.main", False), tmp_path)
    assert "command and args" in failure.remedy


@pytest.mark.parametrize("read", [torch.load, load_yaml])
def test_damaged_file_is_final_only_if_nobody_has_written_it_since_the_start(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lr: 0.1\n  wd: [1\n")
    assert examine(lambda: read(path), tmp_path).outcome.exit_code == 82
    assert examine_later(lambda: read(path), tmp_path / "..").outcome.exit_code == 81


@pytest.mark.parametrize(
    "work",
    [
        lambda folder: folder.mkdir(),
        lambda folder: folder.open(),
    ],
)
def test_path_is_final_only_if_nobody_has_written_there_since_the_start(
    work: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "file").touch()
    assert examine(lambda: work(folder), tmp_path).outcome.exit_code == 82
    (tmp_path / "errors" / "0.json").unlink()
    assert examine_later(lambda: work(folder), tmp_path).outcome.exit_code == 81


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (lambda folder: (folder / "data" / "train.bin").read_bytes(), 82),
        (lambda folder: torch.save(torch.zeros(1), folder / "runs" / "model.pt"), 82),
        (lambda folder: Path("/no-such-folder/train.bin").read_bytes(), 81),
        (lambda folder: torch.save(torch.zeros(1), "/no-such-folder/model.pt"), 81),
    ],
)
def test_missing_path_is_final_only_where_no_peer_creates_it(
    work: Callable[[Path], object], code: int, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert examine_later(lambda: work(tmp_path), tmp_path).outcome.exit_code == code


def test_missing_file_in_an_empty_folder_may_be_of_a_volume_that_is_not_mounted_yet(tmp_path: Path) -> None:
    assert not is_lasting_error(errno.ENOENT, str(tmp_path / "x"), time.time() + HOUR)


@pytest.mark.parametrize(
    ("mount", "number", "lasting"),
    [
        ("rw,relatime - ext4 /dev/x rw", errno.ENOENT, False),
        ("ro,relatime - ext4 /dev/x rw", errno.ENOENT, True),
        ("rw,relatime - ext4 /dev/x rw", errno.EACCES, True),
        ("rw,relatime - ext4 /dev/x rw", errno.ELOOP, True),
        ("rw,relatime - nfs4 server:/x rw", errno.ENOENT, False),
        ("ro,relatime - nfs4 server:/x rw", errno.EROFS, True),
        ("ro,relatime - ext4 /dev/x ro,errors=remount-ro", errno.EROFS, False),
        ("rw,relatime - ext4 /dev/x rw", errno.EIO, False),
        ("garbage", errno.ENOENT, False),
    ],
)
def test_mount_decides_whether_a_path_stays_as_it_is(
    mount: str, number: int, lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 0 8:1 / / rw - overlay overlay rw\n2 1 8:2 / {tmp_path} {mount}\n")
    monkeypatch.setattr(lasting_files, "_MOUNTS", str(mounts))
    assert is_lasting_error(number, str(tmp_path / "x" / "y"), time.time() + HOUR) is lasting


def write_start(folder: Path, seconds: float) -> None:
    """Write the record of a rank that started some seconds ago."""
    (folder / "workers").mkdir()
    record = {"pid": 1, "rank": 0, "localRank": 0, "restart": 0, "started": time.time() - seconds}
    write_json(str(folder / "workers" / "0.json"), record)


MISMATCH: Final = "Detected mismatch between collectives on ranks"
LOST: Final = "[pair.cc:553] Connection closed by peer [10.0.0.1]:2456. gloo/transport/tcp"


@pytest.mark.parametrize(
    ("message", "left", "seconds", "code"),
    [
        (MISMATCH, None, 20, 81),
        (MISMATCH, None, 2 * HOUR, 82),
        (LOST, RankEnd(rank=1), 20, 81),
        (LOST, RankEnd(rank=1), 2 * HOUR, 82),
        (LOST, RankEnd(rank=1, exception="TimeoutError"), 20, 82),
    ],
)
def test_ranks_that_part_within_minutes_do_so_in_each_attempt(
    message: str, left: RankEnd | None, seconds: float, code: int, tmp_path: Path
) -> None:
    write_start(tmp_path, seconds)
    end = WorkerEnd(1, "RuntimeError", message, time=time.time())
    failure = examine_worker(launcher_pod(tmp_path), end, EndedPeers(left, total=1))
    assert failure.outcome.exit_code == code


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 7.",
        "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
    ],
)
def test_end_of_a_helper_has_one_signature(text: str, tmp_path: Path) -> None:
    kind, _, message = text.partition(": ")
    assert examine_worker(launcher_pod(tmp_path), WorkerEnd(1, kind, message)).signature == HELPER_ENDED


@pytest.mark.parametrize(
    ("helper", "exit_code"),
    [
        ("IndexError: string index out of range", EXIT_USER_ERROR),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", EXIT_RETRYABLE),
        ("", EXIT_RETRYABLE),
    ],
)
def test_exception_of_a_helper_decides_whether_its_end_recurs(helper: str, exit_code: int, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    trace = 'Process Env-1:\nTraceback (most recent call last):\n  File "/app/env.py", line 3, in run\n    f()\n'
    (tmp_path / "output" / "0.end").write_text(f"{trace}{helper}\n" if helper else "epoch 1\n")
    first, second = multiprocessing.Pipe()
    second.close()
    failure = examine(first.recv, tmp_path)
    assert failure.container_exit_code == exit_code


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [
        ("ProcessGroupGloo::scatter: Incorrect input list size 4. Input list size should be 2", EXIT_USER_ERROR),
        ("[rank0]:[F1130 17:38:02.409328314 ProcessGroupGloo.cpp:1537] Check failed: 6 vs. 7", EXIT_USER_ERROR),
        ("ProcessGroupGloo::scatter: Connection closed by peer", EXIT_PEER_LOST),
    ],
)
def test_arguments_that_a_process_group_refuses_are_a_mistake(message: str, exit_code: int, tmp_path: Path) -> None:
    error = {"type": "RuntimeError", "message": message, "exitCode": 1}
    chain = [{"types": ["RuntimeError"], "message": message, "place": "/site-packages/torch/distributed/c10d.py"}]
    (tmp_path / "errors").mkdir()
    write_json(str(tmp_path / "errors/0.json"), {**error, "chain": chain})
    assert examine_worker(launcher_pod(tmp_path), WorkerEnd(1)).container_exit_code == exit_code


def query_in_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        connection = pool.submit(sqlite3.connect, ":memory:").result()
    connection.execute("SELECT 1")


def test_error_of_programming_of_a_database_is_a_mistake(tmp_path: Path) -> None:
    assert examine(query_in_another_thread, tmp_path).container_exit_code == EXIT_USER_ERROR


@pytest.mark.parametrize(
    ("message", "place", "line", "expected"),
    [
        ("Given groups=1, weight of size [1], expected input[1]", "nn/modules/conv.py", "return F.conv2d(x)", True),
        ("Calculated padded input size per channel", "nn/modules/conv.py", "return F.conv2d(x)", True),
        ("Expected lengths of 22 (while checking arguments for ctc_loss_allocate)", "nn/functional.py", "f(x)", True),
        ("it must override this. For more details, please see https://a.b/c", "autograd/a.py", "raise Error(", True),
        ("miopenStatusInternalError", "nn/modules/conv.py", "return F.conv2d(x)", False),
        ("could not create a primitive", "nn/modules/conv.py", "return F.conv2d(x)", False),
        ("probability tensor contains either `inf`, `nan` or element < 0", "functional.py", "multinomial(p, 1)", False),
    ],
)
def test_native_error_of_a_device_or_a_divergence_may_not_recur(
    message: str, place: str, line: str, expected: bool
) -> None:
    path = f"/usr/lib/python3.11/site-packages/torch/{place}"
    facts = ExceptionFacts(("RuntimeError",), message, place=path, line=line)
    assert recurs(UNKNOWN_KIND, [facts], lasted=1.0, elastic=False) is expected


@pytest.mark.parametrize(
    ("kind", "place", "line", "expected"),
    [
        ("torch.utils.checkpoint.CheckpointError", "utils/checkpoint.py", "raise CheckpointError(", True),
        ("torch.distributed.DistError", "distributed/c10d.py", "raise DistError(", False),
    ],
)
def test_check_of_torch_with_a_class_of_its_own_recurs(kind: str, place: str, line: str, expected: bool) -> None:
    path = f"/usr/lib/python3.11/site-packages/torch/{place}"
    message = "recomputed values differ\nTip: see https://a.b/c for the status of this"
    facts = ExceptionFacts((kind, "RuntimeError"), message, place=path, line=line)
    assert recurs(UNKNOWN_KIND, [facts], lasted=1.0, elastic=False) is expected


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("RuntimeError",), "CUDA error: unspecified launch failure"),  # of an earlier kernel
        (("RuntimeError",), "std::bad_alloc"),
        (("RuntimeError",), "the connection to the server timed out"),
        (("threading.BrokenBarrierError", "RuntimeError"), ""),  # somebody was slow
    ],
)
def test_tensors_on_the_cpu_do_not_hide_another_cause(types: tuple[str, ...], message: str) -> None:
    place = "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py"
    facts = ExceptionFacts(types, message, place=place, line="return f(x)", failing=FailingCode(device="cpu"))
    assert not recurs(UNKNOWN_KIND, [facts], lasted=1.0, elastic=False)


def look_up_untrusted() -> None:
    """Raise what urllib raises for a certificate: an OSError without a number, with its cause as the argument."""
    try:
        raise ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    except OSError as error:
        raise urllib.error.URLError(error)  # noqa: B904


def test_special_kind_that_a_general_one_wraps_decides(tmp_path: Path) -> None:
    assert "SSL_CERT_FILE" in examine(look_up_untrusted, tmp_path).remedy
