"""Remedies by the code that failed: names that exist, what checks require, and the values that operations got."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import enum
import importlib
import random
import runpy
import textwrap
import threading
import warnings
from collections.abc import Callable, Collection
from multiprocessing.pool import ApplyResult
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, default_collate, random_split

from ddp_pod.base.exceptions import FailingCode
from ddp_pod.contract.names import EXIT_RETRYABLE, EXIT_USER_ERROR
from ddp_pod.rank.failing_code import find_failing_code
from ddp_pod.rank.values import describe
from ddp_pod.rank.ways import Root, list_ways
from tests.support.rank_errors import catch, examine

SECRET: Final = "correct horse"


class Settings:
    """Settings of a script, with an attribute that is computed."""

    image: Any = None

    @property
    def password(self) -> str:
        raise AssertionError("code of the script runs")


class Color(enum.Enum):
    """Values with names."""

    RED = 1


class Layers(nn.Module):
    """A module of a script whose layers are in containers of Python."""

    def __init__(self, layers: object) -> None:
        super().__init__()
        self.layers = layers

    def compute_loss(self) -> None:
        """Compute, as the method of a model."""


def train(model: object, epochs: int, rate: float = 0.1) -> None:
    """Train, as a function of a script."""


def read_key() -> None:
    checkpoint = {"model_state": 1, "optimizer_state": 2}
    checkpoint["model_state_dict"]


def read_nested_key() -> None:
    config = {"train": {"lr": 0.1}}
    config["train"]["rate"]


def read_variable() -> None:
    settings_of_run = 3
    print(setings_of_run, settings_of_run)  # type: ignore[name-defined]  # noqa: F821


def read_module() -> None:
    tomllib.loads("")  # type: ignore[name-defined]  # noqa: F821


def read_attribute() -> None:
    nn.Linar  # type: ignore[attr-defined]  # noqa: B018


def read_none() -> None:
    batch = Settings()
    batch.image.shape  # noqa: B018


def read_unassigned() -> None:
    if random.random() > 1:
        loss = 1
    print(loss)


def call_wrongly() -> None:
    train(1, epoch=3)  # type: ignore[call-arg]


def split_wrongly() -> None:
    data = list(range(10))
    random_split(data, [7, 2])


def divide() -> None:
    total = 0
    assert 1 / total


def assert_divisible() -> None:
    batch, world = 7, 2
    assert batch % world == 0


def refuse() -> None:
    label, classes = 7, 4
    if label >= classes:
        raise ValueError("bad label")


def add() -> None:
    first = torch.zeros(4, 10)
    second = torch.zeros(3, 10)
    first + second


def add_in_library() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(10, 4))
    net(torch.zeros(2, 8))


def mix_types() -> None:
    nn.Linear(8, 4).to(torch.bfloat16)(torch.zeros(2, 8))


def mix_devices() -> None:
    first = torch.zeros(2, device="meta")
    second = torch.zeros(2)
    torch.addmm(first, second, second)


def encode() -> None:
    labels = torch.tensor([0, 5])
    nn.functional.one_hot(labels, num_classes=3)


def call_wrapped() -> None:
    model = nn.Sequential(Layers(()))
    model.compute_loss()  # type: ignore[operator]


def call_unwrapped() -> None:
    model = Layers(())
    model.module.compute_loss()  # type: ignore[union-attr]


def optimize_list() -> None:
    net = Layers([nn.Linear(8, 8), nn.Linear(8, 4)])
    torch.optim.SGD(net.parameters(), lr=0.1)


def store_scores() -> None:
    scores = torch.zeros(4, 3, dtype=torch.bfloat16)
    scores.cpu().numpy()


def scale() -> None:
    shadow = collections.OrderedDict(steps=torch.tensor(7))
    shadow["steps"].mul_(0.5).add_(1)


def compare_losses() -> None:
    scores = torch.zeros(4, 3)
    labels = torch.ones(4)
    F.nll_loss(scores, labels)


def compare_with_text() -> None:
    settings: dict[str, Any] = {"lr": "3e-4"}
    settings["lr"] < 0.1  # noqa: B015


def split_row() -> None:
    row = "b,2,3"
    _, _ = row.split(",")


def split_open() -> None:
    row = "b,2"
    _, _, _, *_ = row.split(",")


def parse_nothing() -> None:
    row = {"label": ""}
    int(row["label"])


def subtract_array() -> None:
    mean = np.full(4, np.nan)
    np.ones((8, 3)) - mean


def connect() -> None:
    edges = torch.tensor([[1, 40], [0, 3]])
    torch.sparse_coo_tensor(edges, torch.ones(2), (8, 8), check_invariants=True)


def embed() -> None:
    tokens = torch.tensor([1, 5, 120])
    nn.Embedding(100, 8)(tokens)


def collate() -> None:
    default_collate([torch.zeros(3, 10), torch.zeros(3, 11)])


def collate_nothing() -> None:
    default_collate([1, None])


def normalize_one() -> None:
    nn.BatchNorm1d(4)(torch.randn(1, 4))


def subtract_last() -> None:
    first = torch.zeros(8, 3)
    target = torch.zeros(5, 3)
    first - target


def run_loop_in_loop() -> None:
    async def run() -> None:
        coroutine = asyncio.sleep(0)
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()

    asyncio.run(run())


def compute_with_text() -> None:
    password = SECRET
    settings = Settings()
    print(1 + password, settings.password)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (read_key, "checkpoint has model_state, optimizer_state: correct the name"),
        (read_nested_key, "config['train'] has lr: correct the name"),
        (read_variable, "there is settings_of_run: correct the name"),
        (read_module, "import tomllib"),
        (read_attribute, f"torch.nn has Linear (torch {torch.__version__}): correct the name, or use the version"),
        (read_none, "meet what `batch.image.shape` requires: batch.image is not None"),
        (read_unassigned, "assign `loss` on every path to this line"),
        (call_wrongly, "train() takes epochs: correct the name"),
        (split_wrongly, "`random_split(data, [7, 2])` requires: sum(lengths) == len(dataset) (lengths: [7, 2], "),
        (divide, "meet what `1 / total` requires: total != 0 (total: 0)"),
        (assert_divisible, "fix this line of the script, or what it refuses: batch % world != 0 (batch: 7, world: 2)"),
        (refuse, "fix this line of the script, or what it refuses: label >= classes (label: 7, classes: 4)"),
        (add, ": `first + second` (first: float32[4, 10], second: float32[3, 10])"),
        (
            add_in_library,
            "make the shapes fit: `net(torch.zeros(2, 8))` (input: float32[2, 16], net.1.weight: float32[4, 10]",
        ),
        (mix_types, "or use torch.autocast: `nn.Linear(8, 4).to(torch.bfloat16)(torch.zeros(2, 8))` (input: float32"),
        (mix_devices, "move the tensors to one device: "),
        (encode, "Class values must be smaller than num_classes (labels: int64[2] of 0 to 5)"),
        (call_wrapped, "Sequential has .0.compute_loss: correct the name"),
        (call_unwrapped, "Layers is not wrapped (omit .module): correct the name"),
        (optimize_list, "net: Layers without parameters (layers is a plain list of 2 modules: use nn.ModuleList)"),
        (store_scores, "convert it (.float(), .to(dtype)): `scores.cpu().numpy()` (scores: bfloat16[4, 3])"),
        (scale, "convert it (.float()): `shadow['steps'].mul_(0.5)` (shadow['steps']: int64[] of 7)"),
        (run_loop_in_loop, "as the message says: asyncio.run() cannot be called from a running event loop"),
        (compute_with_text, "(password: str of 13)"),
        (
            compare_losses,
            "convert it (.long()): `F.nll_loss(scores, labels)` (input: float32[4, 3], target: float32[4])",
        ),
        (compare_with_text, "convert the string (settings['lr']): `settings['lr'] < 0.1` (settings['lr']: str of 4)"),
        (split_row, "meet what `row.split(',')` requires: len(row.split(',')) == 2 (row: str of 5)"),
        (split_open, "requires: len(row.split(',')) >= 3 (row: str of 3)"),
        (parse_nothing, "`int(row['label'])` (row['label']: empty str)"),
        (subtract_array, "make the shapes fit: `np.ones((8, 3)) - mean` (mean: float64[4], not finite)"),
        (embed, "compare it with the layer's size (weight: float32[100, 8], input: int64[3] of 1 to 120)"),
        (connect, "keep `edges` within the size of what it selects from, or enlarge that: `torch.sparse_coo_tensor("),
        (collate, "pad, convert or drop them (collate_fn) (the batch: 1 of float32[3, 10], 1 of float32[3, 11])"),
        (collate_nothing, "or are None: pad, convert or drop them (collate_fn)"),
        (normalize_one, "also of the last, smaller batch (drop_last=True)"),
        (subtract_last, "also of the last, smaller batch (drop_last=True): `first - target` (first: float32[8, 3]"),
    ],
)
def test_code_that_failed_shows_what_to_change(work: Callable[[], None], remedy: str, tmp_path: Path) -> None:
    failure = examine(work, tmp_path)
    assert remedy in failure.remedy
    assert SECRET not in failure.remedy


def reshape() -> None:
    torch.zeros(4, device="meta").view(3)


@pytest.mark.parametrize(("work", "device"), [(scale, "cpu"), (store_scores, "cpu"), (reshape, ""), (mix_types, "cpu")])
def test_device_of_known_tensors_in_a_native_call(work: Callable[[], None], device: str) -> None:
    assert find_failing_code(catch(work)).device == device


def test_refusal_of_tensors_on_the_cpu_is_final_unless_a_number_is_not_finite(tmp_path: Path) -> None:
    def sample(weight: float) -> None:
        weights = torch.full((3,), weight)
        torch.multinomial(weights, 1)

    assert examine(scale, tmp_path).container_exit_code == EXIT_USER_ERROR
    assert examine(lambda: sample(0.0), tmp_path).container_exit_code == EXIT_RETRYABLE, "numbers may be random"
    assert examine(lambda: sample(float("nan")), tmp_path).container_exit_code == EXIT_RETRYABLE


def test_library_without_a_line_of_the_script_shows_tensors_alone() -> None:
    def check(error: BaseException) -> FailingCode:
        trace = error.__traceback__
        while trace is not None and "site-packages" not in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        return find_failing_code(error.with_traceback(trace))

    tensors = [torch.zeros(3, 10), torch.zeros(3, 11)]
    failing = check(catch(lambda: default_collate(tensors)))
    assert (failing.code, failing.values) == ("", "the batch: 1 of float32[3, 10], 1 of float32[3, 11]")
    failing = check(catch(lambda: nn.GroupNorm(4, 10)))
    assert failing == FailingCode()


def test_statements_of_one_line_are_told_apart() -> None:
    def scale_scores() -> None:
        scores = torch.zeros(3); scores.view(2)  # fmt: skip  # noqa: E702

    assert find_failing_code(catch(scale_scores)).code == "scores.view(2)"


def test_check_that_a_helper_of_the_library_reports_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    library = ["def fail(text):", "    raise ValueError(text)", "def load(count):", "    if count < 1: fail('few')"]
    (folder / "toolkit.py").write_text("\n".join(library))
    monkeypatch.syspath_prepend(folder)
    toolkit = importlib.import_module("toolkit")
    failing = find_failing_code(catch(lambda: toolkit.load(0)))
    assert (failing.code, failing.check, failing.values) == ("toolkit.load(0)", "count >= 1", "count: 0")


def test_exception_that_an_object_keeps_requires_nothing_of_its_caller() -> None:
    result: Any = object.__new__(ApplyResult)
    vars(result).update(_success=False, _value=ValueError("bad record"), _event=threading.Event())
    result._event.set()
    assert find_failing_code(catch(lambda: result.get())).check == ""


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_tensors_whose_numbers_cannot_be_read_keep_their_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    def compute() -> None:
        codes = torch.zeros(4, 3).to(dtype)
        codes @ torch.zeros(2, 2)

    assert f"(codes: {str(dtype).removeprefix('torch.')}[4, 3]" in examine(compute, tmp_path).remedy


def test_record_shows_no_warning_of_the_source_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'PATTERN = "\\d"\n1 / int("0")\n'
    path = tmp_path / "train.py"
    path.write_text(source)

    def warn(*_: object) -> None:
        raise AssertionError("code of the script ran")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(source, str(path), "exec")
    monkeypatch.setattr(warnings, "showwarning", warn)
    warnings.simplefilter("always")
    assert "1 / int('0')" in examine(lambda: exec(code, {}), tmp_path).remedy


def test_keys_of_a_large_vocabulary_are_not_all_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(name: str, names: Collection[str], *limits: float) -> list[str]:
        compared.append(len(names))
        return []

    def look_up() -> None:
        vocabulary = {f"word {number}": number for number in range(100_000)}
        vocabulary["unknown"]

    monkeypatch.setattr("ddp_pod.rank.near_names.difflib.get_close_matches", compare)
    assert "word 5 and 99994 more" in examine(look_up, tmp_path).remedy
    assert max(compared) < 5_000


def test_without_positions_the_statement_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_pod.rank.failing_code.find_position", lambda code, instruction: ())
    assert find_failing_code(catch(add)).values == "first: float32[4, 10], second: float32[3, 10]"


def test_loops_and_blocks_in_one_line_are_told_apart(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """\
            mask = table = None
            def check():
                if len(mask) == 3: pass
            def loop():
                for row in table: pass
            """
        )
    )
    names: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), names)
    checks = [find_failing_code(catch(names[name])).values for name in ("check", "loop")]
    assert checks == ["mask: None", "table: None"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (SECRET, "str of 13"),
        ((1, 2.5), "(1, 2.5)"),
        ([SECRET, 1], "list of 2 (1)"),
        ({"lr": SECRET, 3: 4}, "dict of 2 (lr, 3)"),
        (1 << 70, "integer of 71 bits"),
        (torch.tensor([1.0, float("nan")]), "float32[2], not finite"),
        (torch.arange(70_000).flip(0), "int64[70000] of 0 to 69999"),  # in parts
        (torch.arange(140_000).view(2, -1).T, "int64[70000, 2]"),  # its parts would be copies
        (torch.tensor(0.5), "float32[] of 0.5"),
        (Settings(), "Settings"),
        (Color.RED, "Color.RED"),
        (nn.ReLU(), "ReLU"),
        (nn.Linear(2, 2), "Linear"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear of 2 parameters, all frozen (requires_grad=False)"),
        (
            nn.Sequential(nn.Linear(2, 2), Layers({"head": nn.Linear(2, 2)})),
            "Sequential (1.layers is a plain dict of 1 module: use nn.ModuleDict)",
        ),
        (Layers([SECRET]), "Layers without parameters"),
    ],
)
def test_values_are_described_without_their_content(value: object, text: str) -> None:
    assert describe(value) == text


def collate(samples: list[Any]) -> None:
    list(DataLoader(samples, batch_size=len(samples)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([(torch.zeros(3), 1)] * 3 + [None], "the batch: 3 of (float32[3], int), 1 of None"),
        ([{"x": torch.zeros(3)}, {"x": torch.zeros(4)}], "the batch: 1 of {x: float32[3]}, 1 of {x: float32[4]}"),
        ([[1, 2], [1, 2, 3]], "the batch: 1 of [int, int], 1 of [int, int, int]"),
    ],
)
def test_samples_that_cannot_be_combined_are_described(samples: list[Any], text: str, tmp_path: Path) -> None:
    remedy = examine(lambda: collate(samples), tmp_path).remedy
    assert remedy == f"items differ in size or type, or are None: pad, convert or drop them (collate_fn) ({text})"


def test_sample_of_a_type_that_cannot_be_combined_is_described() -> None:
    failing = find_failing_code(catch(lambda: collate([Settings()] * 2)))
    assert failing.values == "the batch: 2 of Settings"


def score() -> None:
    scores = torch.tensor([-2.5, 0.5, 3.25])
    labels = torch.tensor([0.0, 1.0, 1.0])
    nn.functional.binary_cross_entropy(scores, labels)


def test_numbers_of_tensors_with_equal_shapes_and_the_variant_of_the_function_are_shown(tmp_path: Path) -> None:
    remedy = examine(score, tmp_path).remedy
    assert "input: float32[3] of -2.5 to 3.25, target: float32[3] of 0 to 1" in remedy
    assert remedy.endswith("; see also binary_cross_entropy_with_logits")


class Caching(nn.Module):
    """A module that keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept: list[torch.Tensor] = []


def copy_cache() -> None:
    model = nn.Sequential(Caching())
    model[0].kept.append(model[0].linear(torch.zeros(1, 2)))
    copy.deepcopy(model)


def test_value_of_a_library_has_the_name_by_which_the_script_reaches_it(tmp_path: Path) -> None:
    remedy = examine(copy_cache, tmp_path).remedy
    assert remedy.startswith("take the tensor out of its graph: .detach()")
    assert remedy.endswith("(model.0.kept[0]: float32[1, 2])")


def test_equal_numbers_are_not_taken_for_a_part_of_the_script() -> None:
    model = Caching()
    model.kept = [1, "x", None, ()]  # type: ignore[list-item]
    ways = list_ways([Root("model", model), Root("names", {"a": {"b": model.linear.weight}})])
    assert not {id(1), id("x"), id(None), id(()), id(True)} & set(ways)
    assert ways[id(model.linear.weight)] == "model.linear.weight"
    assert ways[id(model.kept)] == "model.kept"
    assert id(model) not in ways


def test_ways_are_looked_for_among_a_limited_number_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[object() for _ in range(10)] for _ in range(10)]
    assert list_ways([Root("rows", rows)])[id(rows[9][9])] == "rows[9][9]"
    monkeypatch.setattr("ddp_pod.rank.ways._MOST_PARTS", 15)
    ways = list_ways([Root("rows", rows)])
    assert (ways[id(rows[0][4])], id(rows[0][5]) in ways) == ("rows[0][4]", False)


def test_long_keys_of_samples_are_not_shown() -> None:
    failing = find_failing_code(catch(lambda: collate([{"k" * 50: 1, "x": 2}, {"k" * 50: 1}])))
    assert failing.values == "the batch: 1 of {x: int}, 1 of {}"


def read_key_of_another_type() -> None:
    numbers = {"no": 1, "sv": 2}
    language: Any = False
    numbers[language]


def test_key_of_another_type_than_all_others_is_named(tmp_path: Path) -> None:
    remedy = examine(read_key_of_another_type, tmp_path).remedy
    assert remedy.startswith("numbers has no, sv, keys of type str, not bool: ")


def set_item() -> None:
    gathered: list[int] = []
    rank = 1
    gathered[rank] = 5


def pass_used_iterator() -> None:
    trainable = filter(lambda parameter: parameter.requires_grad, nn.Linear(2, 2).parameters())
    list(trainable)
    torch.optim.AdamW(trainable)


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (set_item, "meet what `gathered[rank]` requires: len(gathered) > rank (gathered: [], rank: 1)"),
        (pass_used_iterator, "(param_groups: [], trainable: filter, an iterator, which gives its items once)"),
    ],
)
def test_lists_that_are_too_short_and_used_iterators_are_shown(
    work: Callable[[], None], remedy: str, tmp_path: Path
) -> None:
    assert remedy in examine(work, tmp_path).remedy


def read_marked_column() -> None:
    row = {"\ufefftext": 1, "stars\xa0": 2}
    row["text"]


def test_invisible_characters_of_a_key_are_shown(tmp_path: Path) -> None:
    remedy = examine(read_marked_column, tmp_path).remedy
    assert remedy.startswith(
        r"row has '\ufefftext', 'stars\xa0' (a byte order mark: read the file as utf-8-sig)".replace(r"\\", "\\")
    )


def test_relative_import_of_a_program_is_explained(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from .model import Net\n")
    remedy = examine(lambda: runpy.run_path(str(script), run_name="__main__"), tmp_path).remedy
    assert remedy == (
        "import model without the dot, or start the file within its package (python -m): it runs as a program"
    )


def find_loop() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.get_event_loop).result()


def test_own_state_of_a_library_is_no_requirement_for_a_script(tmp_path: Path) -> None:
    failure = examine(find_loop, tmp_path)
    assert "There is no current event loop" in failure.message
    assert "self._local" not in failure.remedy
    assert failure.remedy.startswith("no event loop runs in this thread")
