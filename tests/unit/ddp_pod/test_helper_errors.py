"""The code that failed in a helper process of PyTorch, such as a DataLoader worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._utils import ExceptionWrapper

from ddp_pod.base.exceptions import FailingCode
from ddp_pod.contract.names import EXIT_USER_ERROR
from ddp_pod.rank.failing_code import find_failing_code
from ddp_pod.rank.helper_errors import HelperErrors
from tests.support.rank_errors import examine


class Unbuildable(Exception):
    """An exception that a text alone does not build."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def normalize() -> None:
    image = torch.zeros(1, 4, 4)
    mean = torch.zeros(3)
    image.sub_(mean.view(-1, 1, 1))


def refuse() -> None:
    pixels = 3
    raise Unbuildable(pixels, 4)


def fail(error: BaseException) -> FailingCode:
    raise AssertionError


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a hook does to the class."""
    monkeypatch.setattr(ExceptionWrapper, "__init__", ExceptionWrapper.__init__)


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
    HelperErrors(find_failing_code).start()
    failure = examine(send(normalize, is_explicit=is_explicit), tmp_path)
    assert "`image.sub_(mean.view(-1, 1, 1))` (image: float32[1, 4, 4], mean: float32[3])" in failure.remedy
    assert "(in DataLoader worker process 3)" in failure.message
    assert failure.container_exit_code == EXIT_USER_ERROR


def test_exception_that_cannot_be_built_has_its_code(tmp_path: Path) -> None:
    HelperErrors(lambda _: FailingCode(check="pixels == 4")).start()
    assert "what it refuses: pixels == 4" in examine(send(refuse), tmp_path).remedy


@pytest.mark.parametrize("find", [fail, lambda _: FailingCode(1)])  # type: ignore[arg-type]
def test_failed_search_changes_nothing(find: Callable[[BaseException], FailingCode], tmp_path: Path) -> None:
    HelperErrors(find).start()
    failure = examine(send(normalize), tmp_path)
    assert failure.message.startswith("RuntimeError: output with shape [1, 4, 4]")
    assert "normalize" in failure.traceback


def test_helper_without_a_record_has_no_code_of_its_rank(tmp_path: Path) -> None:
    assert "reraise" not in examine(send(normalize), tmp_path).remedy
