"""The code that failed in a helper process of a rank, such as a DataLoader worker or a process of a pool."""

from __future__ import annotations

import multiprocessing.pool
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import process
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper

from ddp_pod.base.exceptions import FailingCode
from ddp_pod.contract.names import EXIT_USER_ERROR
from ddp_pod.rank.failing_code import find_failing_code
from ddp_pod.rank.helper_errors import observe_helpers
from tests.support.rank_errors import examine


class Unbuildable(Exception):
    """An exception that a text alone does not build."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


class Closed(Exception):
    """An exception that accepts no further attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            raise AttributeError(name)
        super().__setattr__(name, value)


def normalize() -> None:
    image = torch.zeros(1, 4, 4)
    mean = torch.zeros(3)
    image.sub_(mean.view(-1, 1, 1))


def refuse() -> None:
    pixels = 3
    raise Unbuildable(pixels, 4)


def close() -> None:
    raise Closed("no more")


def read() -> None:
    try:
        open("/absent/labels.csv", encoding="utf-8").close()
    except OSError as error:
        raise RuntimeError("no labels") from error


def fail(error: BaseException) -> FailingCode:
    raise AssertionError


spawn: Any = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of this name
POOLS: dict[str, Any] = {
    "futures": vars(process)["_ExceptionWithTraceback"],
    "multiprocessing": vars(multiprocessing.pool)["ExceptionWithTraceback"],
}


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what the hooks do to the classes."""
    for carrier in (ExceptionWrapper, *POOLS.values()):
        monkeypatch.setattr(carrier, "__init__", carrier.__init__)
    monkeypatch.setattr(spawn, "_wrap", spawn._wrap)


def send(work: Callable[[], None], *, is_explicit: bool = False) -> Callable[[], None]:
    """Return a function that raises the exception of a helper in its rank."""
    try:
        work()
    except Exception as error:
        options = {"exc_info": (type(error), error, error.__traceback__)} if is_explicit else {}
        wrapper = ExceptionWrapper(where="in DataLoader worker process 3", **options)
    received: ExceptionWrapper = pickle.loads(pickle.dumps(wrapper))
    return received.reraise


@pytest.mark.parametrize("is_explicit", [False, True])
def test_failing_code_of_a_helper_is_that_of_its_rank(tmp_path: Path, *, is_explicit: bool) -> None:
    observe_helpers(find_failing_code)
    failure = examine(send(normalize, is_explicit=is_explicit), tmp_path)
    assert "`image.sub_(mean.view(-1, 1, 1))` (image: float32[1, 4, 4], mean: float32[3])" in failure.remedy
    assert "(in DataLoader worker process 3)" in failure.message
    assert failure.container_exit_code == EXIT_USER_ERROR


def test_exception_that_cannot_be_built_has_its_code(tmp_path: Path) -> None:
    observe_helpers(lambda _: FailingCode(check="pixels == 4"))
    assert "what it refuses: pixels == 4" in examine(send(refuse), tmp_path).remedy


@pytest.mark.parametrize("find", [fail, lambda _: FailingCode(1)])  # type: ignore[arg-type]
def test_failed_search_changes_nothing(find: Callable[[BaseException], FailingCode], tmp_path: Path) -> None:
    observe_helpers(find)
    failure = examine(send(normalize), tmp_path)
    assert failure.message.startswith("RuntimeError: output with shape [1, 4, 4]")
    assert "normalize" in failure.traceback


def test_helper_without_a_record_has_no_code_of_its_rank(tmp_path: Path) -> None:
    assert "reraise" not in examine(send(normalize), tmp_path).remedy


# -- pools


def send_by_pool(work: Callable[[], None], pool: str) -> Callable[[], None]:
    """Return a function that raises the exception of a pool's process in its rank."""
    try:
        work()
    except Exception as error:
        sent = pickle.dumps(POOLS[pool](error, error.__traceback__))

    def get() -> None:
        raise pickle.loads(sent)

    return get


@pytest.mark.parametrize("pool", POOLS)
def test_failing_code_of_a_pool_is_that_of_its_process(tmp_path: Path, pool: str) -> None:
    observe_helpers(find_failing_code)
    remedy = examine(send_by_pool(normalize, pool), tmp_path).remedy
    assert "`image.sub_(mean.view(-1, 1, 1))` (image: float32[1, 4, 4], mean: float32[3])" in remedy


def test_cause_in_a_pool_decides(tmp_path: Path) -> None:
    observe_helpers(find_failing_code)
    failure = examine(send_by_pool(read, "futures"), tmp_path)
    assert "FileNotFoundError" in failure.message
    assert "correct the path" in failure.remedy
    assert "RemoteTraceback" not in failure.message


def test_exception_without_room_for_the_code_is_sent_unchanged(tmp_path: Path) -> None:
    observe_helpers(find_failing_code)
    assert examine(send_by_pool(close, "futures"), tmp_path).message == "Closed: no more"


@pytest.mark.parametrize("pool", POOLS)
def test_failed_search_in_a_pool_changes_nothing(tmp_path: Path, pool: str) -> None:
    observe_helpers(fail)
    failure = examine(send_by_pool(normalize, pool), tmp_path)
    assert failure.message.startswith("RuntimeError: output with shape [1, 4, 4]")


# -- spawn


class EndedProcess:
    """A process of ``spawn`` that has failed."""

    sentinel = 3
    exitcode = 1
    pid = 7

    def join(self, timeout: float | None = None) -> None:
        """Return at once."""

    def is_alive(self) -> bool:
        """Return that it has ended."""
        return False


def send_by_spawn(
    work: Callable[[int], None], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Iterator[None]]:
    """Return a function that raises the exception of a process of ``spawn`` in its rank."""
    monkeypatch.setattr(spawn, "_prctl_pr_set_pdeathsig", lambda _: None)
    monkeypatch.setattr(multiprocessing.connection, "wait", lambda sentinels, timeout: list(sentinels))
    with pytest.raises(SystemExit):
        pickle.loads(pickle.dumps(spawn._wrap))(work, 0, (), str(path))
    context: Any = spawn.ProcessContext([EndedProcess()], [str(path)])
    join: Callable[[], Iterator[None]] = context.join
    return join


def test_failing_code_of_a_spawned_process_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observe_helpers(find_failing_code)
    join = send_by_spawn(lambda _: normalize(), tmp_path / "error", monkeypatch)
    failure = examine(join, tmp_path)
    assert "`image.sub_(mean.view(-1, 1, 1))` (image: float32[1, 4, 4], mean: float32[3])" in failure.remedy
    assert "(in Process 0)" in failure.message


@pytest.mark.parametrize("find", [fail, lambda _: FailingCode(1)])  # type: ignore[arg-type]
def test_failed_search_in_a_spawned_process_changes_nothing(
    find: Callable[[BaseException], FailingCode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe_helpers(find)
    failure = examine(send_by_spawn(lambda _: normalize(), tmp_path / "error", monkeypatch), tmp_path)
    assert failure.message.startswith("RuntimeError: output with shape [1, 4, 4]")
