"""Remedies by the class of an exception and what its frames hold, from real exceptions."""

from __future__ import annotations

import base64
import csv
import importlib.metadata
import multiprocessing
import os
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.tensor
from torch.utils.checkpoint import checkpoint

from ddp_pod.contract.names import EXIT_USER_ERROR
from tests.support.rank_errors import examine


class Meter:
    """No context manager."""


def timed() -> Iterator[None]:
    yield


def unpack() -> None:
    struct.unpack("<q", b"abc")


def decode() -> None:
    text = "abc"
    base64.b64decode(text)


def compile_pattern() -> None:
    re.compile("layer[0")


def find_version() -> None:
    importlib.metadata.version("no-such-package")


def copy() -> None:
    shutil.copyfile(__file__, __file__)


def parse_day() -> None:
    datetime.strptime("2024/01/02", "%Y-%m-%d")


def flip_twice() -> None:
    torch.from_numpy(numpy.zeros(3)[::-1])


def differentiate_twice() -> None:
    query = torch.randn(1, 2, 4, 8, requires_grad=True)
    output = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    (first,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    first.sum().backward()


def quantize_shards() -> None:
    namespace: dict[str, Any] = {"__name__": "torch.distributed.tensor._sharding_prop"}
    source = (
        "def propagate(): raise NotImplementedError('Operator aten.x does not have a sharding strategy registered.')"
    )
    exec(compile(source, torch.distributed.tensor.__file__, "exec"), namespace)
    namespace["propagate"]()


def read_long_field() -> None:
    list(csv.reader(["a," + "x" * (csv.field_size_limit() + 1)]))


def write_read_only() -> None:
    with open(os.devnull, encoding="utf-8") as file:
        file.write("x")


def enter() -> None:
    with Meter():  # type: ignore[attr-defined]
        pass


def enter_generator() -> None:
    with timed():  # type: ignore[attr-defined]
        pass


def divide() -> None:
    batches: list[int] = []
    sum(batches) / len(batches)


def draw() -> None:
    torch.distributions.Normal(torch.zeros(2), torch.tensor([-1.0, 1.0]))


def step_in_half_precision() -> None:
    parameter = torch.ones(1, dtype=torch.float16, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(torch.optim.SGD([parameter], lr=0.1))


def recompute_otherwise() -> None:
    calls = []

    def block(x: Any) -> Any:
        calls.append(1)
        return x.sin().exp() if len(calls) == 1 else x.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def choose_start_twice() -> None:
    for _ in range(2):
        multiprocessing.set_start_method(multiprocessing.get_start_method())


def compare_times() -> None:
    newest = datetime(2026, 1, 1, tzinfo=UTC)
    row = {"time": datetime(2026, 1, 2)}
    print(newest < row["time"])


def read_decimal_comma() -> None:
    row = {"price": "17,25"}
    float(row["price"])


def read_empty_cell() -> None:
    cell = ""
    int(cell)


def search_tensors() -> None:
    [torch.ones(2), torch.ones(2)].index(torch.zeros(2))


def pack_empty() -> None:
    lengths = torch.tensor([2, 0])
    torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(2, 2, 1), lengths, batch_first=True)


def leave_with_text() -> None:
    arguments = ["train.py"]
    if len(arguments) < 2:
        sys.exit("pass the folder of the data")


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (unpack, "pass exactly 8 bytes, as '<q' takes: "),
        (decode, "the 3 characters are no multiple of 4"),
        (compile_pattern, "correct the regular expression at position 5, `[0`; "),
        (find_version, "install the distribution no-such-package"),
        (copy, "copy to another path"),
        (parse_day, "change the format, '%Y-%m-%d', to that of the text"),
        (read_long_field, "increase csv.field_size_limit()"),
        (write_read_only, "file is open in mode 'r': open it in one that allows this"),
        (enter, "define __enter__() and __exit__() in Meter, or use Meter without with"),
        (enter_generator, "decorate timed with @contextlib.contextmanager"),
        (divide, "requires: len(batches) != 0"),
        (draw, "let scale satisfy the constraint: exp() and softplus() make it positive"),
        (step_in_half_precision, "keep the parameters in float32, and let torch.autocast compute in float16"),
        (recompute_otherwise, "checkpoint() calls block (line "),
        (choose_start_twice, "call set_start_method() once, or use get_context(…)"),
        (compare_times, "row['time'] has no time zone"),
        (search_tensors, "by .any() or .all()"),
        (read_decimal_comma, "'17,25' is no number (it has a decimal comma): correct the data"),
        (read_empty_cell, "'' is no number (it is empty): correct the data"),
        (pack_empty, ""),
        (leave_with_text, "or what it refuses: len(arguments) < 2"),
        (flip_twice, "You can probably work around this by making a copy of your array with array.copy()"),
        (differentiate_twice, "second derivative (sdpa_kernel(SDPBackend.MATH))"),
        (quantize_shards, "to_local() or full_tensor() of the sharded tensors"),
    ],
)
def test_class_of_an_exception_and_its_frames_show_what_to_do(
    work: Callable[[], None], remedy: str, tmp_path: Path
) -> None:
    failure = examine(work, tmp_path)
    assert remedy in failure.remedy
    assert failure.container_exit_code == EXIT_USER_ERROR


def decode_symbols() -> None:
    base64.b64decode("ab=c", validate=True)


def open_path() -> None:
    with open("/no/such/path", encoding="utf-8"):
        pass


def enter_lock() -> None:
    with open(os.devnull, encoding="utf-8") as file, file.write:  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("work", [decode_symbols, open_path, enter_lock])
def test_other_mistakes_of_these_classes_get_no_such_remedy(work: Callable[[], None], tmp_path: Path) -> None:
    remedy = examine(work, tmp_path).remedy
    assert "multiple of 4" not in remedy
    assert "context manager:" not in remedy
