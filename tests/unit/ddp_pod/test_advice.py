"""Remedies by an object that refused its use, and whether another attempt may succeed."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import enum
import io
import json
import pprint
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import AuthenticationError
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from ddp_pod.contract.names import EXIT_RETRYABLE, EXIT_USER_ERROR
from tests.support.rank_errors import examine

SETTINGS: Final[Any] = {"lr": 0.1, "steps": 3}


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration that cannot change."""

    lr: float = 0.1

    @property
    def steps(self) -> int:
        """A number that is computed."""
        return 3


class Batch(NamedTuple):
    """A batch that cannot change."""

    x: int


class Mode(enum.Enum):
    """Values with names."""

    FULL = "full"
    QUICK = "quick"


class Transform(abc.ABC):
    """A base class."""

    @abc.abstractmethod
    def transform(self) -> None:
        """Change a sample."""


class Crop(Transform):
    """A class without the method of its base class."""

    def transfrom(self) -> None:
        """Change a sample."""


class Net(nn.Module):
    """A module without a forward."""

    def foward(self) -> None:
        """Compute."""


class State:
    """An object of few attributes."""

    __slots__ = ("step",)


class Scale(torch.autograd.Function):
    """A function whose backward forgets an input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the product."""
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the gradient of the first input alone."""
        return grad * ctx.factor


def set_field() -> None:
    config: Any = Config()
    config.lr = 0.2


def set_property() -> None:
    loader: Any = threading.Thread()
    loader.native_id = 3


def set_slot() -> None:
    state: Any = State()
    state.best = 1


def set_name() -> None:
    batch: Any = Batch(1)
    batch.x = 2


def set_item() -> None:
    betas: Any = (0.9, 0.99)
    betas[1] = 0.95


def drop_in_loop() -> None:
    meters = {"loss": 1.0, "accuracy": 2.0}
    for name in meters.items():
        meters.pop(name[0])


def write_later() -> None:
    with io.StringIO() as log:
        log.write("start")
    log.write("step")


def submit_later() -> None:
    with ThreadPoolExecutor(1) as saver:
        saver.submit(len, "")
    saver.submit(len, "")


def scale() -> None:
    Scale.apply(torch.ones(3, requires_grad=True), 2.0).sum().backward()


def compare_scores() -> None:
    scores = torch.zeros(4)
    if scores > 0.5:
        pass


def hash_box() -> None:
    box: Any = [1, 2]
    {box}  # noqa: B018


def write_set() -> None:
    stats = {"classes": {1, 2}}
    json.dumps(stats)


def read_absent_match() -> None:
    match: Any = re.match("model-(\\d+)", "model-final")
    match.group(1)


def read_absent_setting() -> None:
    classes: Any = SETTINGS.get("classes")
    int(classes)


def make_large() -> None:
    seed = 1 << 200
    torch.tensor([seed])


async def wait() -> None:
    """Do nothing."""


def start_task() -> None:
    coroutine = wait()
    try:
        task = asyncio.create_task(coroutine)
        task.cancel()
    finally:
        coroutine.close()


class Eager(nn.Module):
    """A module that has attributes too early."""

    def __init__(self) -> None:
        self.head = nn.Linear(2, 2)


class Headless(nn.Module):
    """A module whose method lacks its first parameter."""

    def forward(x: Any) -> Any:  # type: ignore[misc]
        """Compute."""
        return x


async def load() -> dict[str, int]:
    """Return a batch."""
    return {}


def read_first_batch() -> None:
    loader = DataLoader(torch.zeros(3, 2), batch_size=8, drop_last=True)  # type: ignore[arg-type]
    next(iter(loader))


def clip() -> None:
    model: Any = nn.Linear(2, 2)
    nn.utils.clip_grad_norm_(model, 1.0)


def print_method() -> None:
    loss: Any = torch.zeros(1)
    print(f"{loss.item:.3f}")


def count_rows() -> None:
    rows: Any = 3
    for _ in rows:
        pass


def call_module() -> None:
    write: Any = pprint
    write("step 1")


def call_loss_twice() -> None:
    criterion: Any = nn.MSELoss()
    for _ in range(2):
        criterion = criterion(torch.zeros(2), torch.ones(2))


def call_headless() -> None:
    net = Headless()
    net(torch.zeros(1))


def read_coroutine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load()["label"]  # type: ignore[index]


def order() -> None:
    places = torch.tensor([1.0, 2.0])
    torch.zeros(4)[places]


def step_without_metric() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    schedule.step()


def halve() -> None:
    count: Any = 8
    range(count / 2)


def differentiate_number() -> None:
    loss: Any = torch.ones(1)
    loss = torch.zeros(1).item()
    loss.backward()


def set_epoch() -> None:
    sampler: Any = RandomSampler([1])
    sampler.set_epoch(1)


@contextmanager
def yield_nothing() -> Iterator[None]:
    """Yield nothing, unlike what contextlib awaits."""
    yield from ()


def enter() -> None:
    with yield_nothing():
        pass


def crop() -> None:
    kind: Any = Crop
    kind()


@pytest.mark.parametrize(
    ("work", "remedy"),
    [
        (set_field, "build another, dataclasses.replace(config, lr=…): `config.lr = 0.2`"),
        (set_property, "loader.native_id is a property without a setter"),
        (set_slot, "State has no best in its __slots__"),
        (set_name, "build another, batch._replace(x=…)"),
        (set_item, "betas cannot change: make it a list"),
        (drop_in_loop, "iterate over a copy, list(meters.items()), as the loop changes it"),
        (write_later, "log is closed since line "),
        (submit_later, "saver is closed since line "),
        (scale, "must return a gradient for each argument of forward (x, factor): of its shape, or None"),
        (compare_scores, "reduce it to one value"),
        (hash_box, "box has no hash: make it a tuple"),
        (write_set, "convert stats['classes'] for JSON, by list(): `json.dumps(stats)`"),
        (read_absent_match, "(match: None, by `re.match('model-(\\\\d+)', 'model-final')` in line "),
        (read_absent_setting, "requires: classes is not None (classes: None, by `SETTINGS.get('classes')` in line "),
        (make_large, "seed has more than 63 bits: reduce it (% 2**63)"),
        (start_task, "no event loop runs in this thread: do it in a coroutine that asyncio.run() runs"),
        (lambda: Mode("fast"), "Mode has 'full', 'quick'"),
        (lambda: Mode["SLOW"], "Mode has 'FULL', 'QUICK'"),
        (read_first_batch, "loader gives no item: it has fewer than 8 samples (drop_last=True): "),
        (clip, "pass model.parameters(): "),
        (print_method, "loss.item is a function: call it, loss.item(): "),
        (count_rows, "iterate over range(rows)"),
        (call_module, "write is a module: call write.pprint()"),
        (call_loss_twice, "criterion is a Tensor since line "),
        (call_headless, "x, the first parameter of Headless.forward (line "),
        (read_coroutine, "await load(): "),
        (differentiate_number, "(loss: 0.0, by `torch.zeros(1).item()` in line "),
        (set_epoch, "RandomSampler has no set_epoch, as DistributedSampler has"),
        (step_without_metric, "pass metrics: `schedule.step()`"),
        (Eager, "call super().__init__() first in Eager.__init__"),
        (enter, "let yield_nothing (line "),
        (order, "convert the index: places.long()"),
        (halve, "or // instead of /"),
        (crop, "define transform in Crop, which has transfrom"),
        (lambda: Net()(), "define forward in Net, which has foward"),
    ],
)
def test_object_that_refuses_its_use_shows_what_to_do(work: Callable[[], object], remedy: str, tmp_path: Path) -> None:
    failure = examine(work, tmp_path)
    assert remedy in failure.remedy
    assert failure.container_exit_code == EXIT_USER_ERROR


METERS: Final = {"loss": 1.0}


def change_in_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in METERS:
            pool.submit(METERS.update, {str(len(METERS)): 1.0}).result()


def keep_size_in_loop() -> None:
    meters = dict(METERS)
    other = meters
    for name in meters:
        other[f"last {name}"] = 1.0
        meters[name] = 0.0


def drop_and_leave(leave: bool = False) -> None:
    meters = {"loss": 1.0, "accuracy": 2.0}
    other = meters
    for name in meters:
        if leave:
            meters.pop(name)
            break
        other.pop(name)


def drop_in_comprehension() -> None:
    meters = {"loss": 1.0, "accuracy": 2.0}
    [meters.pop(name) for name in meters]


def refuse_log() -> None:
    log = io.StringIO()
    log.close()
    raise ValueError(f"no step in {log}")


def pass_closed_log() -> None:
    log = io.StringIO()
    log.close()
    int("x", 0 if log.closed else 10)


class Samples(torch.utils.data.Dataset[int]):
    """An object with slots in a base class, and without any itself."""


def store_wrong_value() -> None:
    samples: Any = Samples()
    samples.first = torch.no_such_name  # type: ignore[attr-defined]


def store_wrong_value_in_slots() -> None:
    state: Any = State()
    state.best = torch.no_such_name  # type: ignore[attr-defined]


def store_wrong_value_in_tuple() -> None:
    betas: Any = (0.9, 0.99)
    betas[1] = len(3)  # type: ignore[arg-type]


def hash_rows() -> None:
    rows: Any = [[1], [2]]
    set(rows)


def make_keys() -> None:
    rows: Any = [[1], [2]]
    dict.fromkeys(rows)


def enumerate_number() -> None:
    rows: Any = 3
    for _ in enumerate(rows):
        pass


def call_parameter(callback: Any = 3) -> None:
    if SETTINGS is None:
        callback = len
    callback("")


def call_either() -> None:
    metric: Any = SETTINGS.get("metric")
    if SETTINGS is None:
        metric = metric()
    metric()


def call_imported() -> None:
    shape: Any = 3
    if SETTINGS is None:
        from torch import tensor as shape
    shape()


def compare(first: int, second: int) -> int:
    """Compare, unlike what a key does."""
    return first - second


def sort_by_comparison() -> None:
    rows = [3, 1]
    sorted(rows, key=compare)  # type: ignore[call-overload]


def collate_two() -> None:
    loader = DataLoader([1, 2], collate_fn=compare)  # type: ignore[arg-type]
    next(iter(loader))


def schedule_by_two() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    torch.optim.lr_scheduler.LambdaLR(optimizer, compare)  # type: ignore[arg-type]


def zip_model() -> None:
    model: Any = nn.Linear(2, 2)
    list(zip(model, [1], strict=True))


def clip_other() -> None:
    model: Any = nn.Linear(2, 2)
    parameters: Any = 3
    nn.utils.clip_grad_norm_(parameters, model)


def make_loader() -> Any:
    """Return a coroutine, without being one of them."""
    return wait()


def read_result_of_function() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_loader()["label"]


def pass_function() -> None:
    names: Any = len
    list(map(str.upper, names))


class Checked:
    """A base class whose method refuses one case alone."""

    def resize(self, size: int) -> int:
        """Return a size."""
        if size < 0:
            raise NotImplementedError("negative sizes")
        return size


class Resized(Checked):
    """A class that needs no method of its own."""


def resize() -> None:
    Resized().resize(-1)


def shift_far() -> None:
    seed = 1 << 2000
    float(seed)


async def change_timeout() -> None:
    """Let asyncio refuse something else than a lookup of its loop."""
    asyncio.timeout(1).reschedule(1.0)


def use_new_timeout() -> None:
    asyncio.run(change_timeout())


def read_used_iterator() -> None:
    rows = (number for number in [1])
    list(rows)
    next(iter(rows))


class Stream(io.RawIOBase):
    """A stream of a script, whose peer has closed it."""

    def readable(self) -> bool:
        """Return that it was open."""
        return True

    @property
    def closed(self) -> bool:
        """Return what no record may ask."""
        return True


def read_closed_stream() -> None:
    stream = io.BufferedReader(Stream())
    stream.read()


class This:
    """A class whose methods call the object otherwise."""

    def step(this, count: int) -> None:
        """Step."""


def count_this() -> None:
    worker: Any = This()
    worker.step(1, 2)


def pass_one_of_two() -> None:
    order: Any = None
    losses: Any = [None, 1]
    max(losses, key=order)


@pytest.mark.parametrize(
    ("work", "untrue"),
    [
        (change_in_thread, "iterate over a copy"),
        (keep_size_in_loop, "iterate over a copy"),
        (drop_and_leave, "iterate over a copy"),
        (drop_in_comprehension, "iterate over a copy"),
        (refuse_log, "is closed"),
        (pass_closed_log, "is closed"),
        (store_wrong_value, "__slots__"),
        (store_wrong_value_in_slots, "__slots__"),
        (store_wrong_value_in_tuple, "cannot change"),
        (hash_rows, "has no hash"),
        (make_keys, "has no hash"),
        (enumerate_number, "iterate over range"),
        (call_parameter, "since line"),
        (call_either, "since line"),
        (call_imported, "since line"),
        (sort_by_comparison, "pass second"),
        (collate_two, "pass second"),
        (schedule_by_two, "pass second"),
        (schedule_by_two, "takes"),
        (zip_model, "pass model.parameters()"),
        (clip_other, "pass model.parameters()"),
        (read_result_of_function, "await"),
        (pass_function, "is a function"),
        (resize, "define resize"),
        (shift_far, "more than 63 bits"),
        (use_new_timeout, "no event loop runs"),
        (read_used_iterator, "gives no item"),
        (read_used_iterator, "is empty"),
        (read_closed_stream, "is closed"),
        (count_this, "add self"),
        (compare_scores, ".item()"),
        (pass_one_of_two, "order is not None"),
    ],
)
def test_what_the_objects_do_not_show_is_not_said(work: Callable[[], object], untrue: str, tmp_path: Path) -> None:
    assert untrue not in examine(work, tmp_path).remedy


@pytest.mark.parametrize("work", [change_in_thread, keep_size_in_loop, drop_and_leave])
def test_container_that_its_loop_does_not_change_may_not_fail_again(work: Callable[[], object], tmp_path: Path) -> None:
    assert examine(work, tmp_path).container_exit_code == EXIT_RETRYABLE


def release() -> None:
    lock = threading.Lock()
    lock.release()


def count_down() -> None:
    first = 10
    torch.arange(first, 2, 1)


def test_class_of_pydantic_shows_its_fields(tmp_path: Path) -> None:
    pydantic = pytest.importorskip("pydantic")
    settings = pydantic.create_model("Settings", __config__={"extra": "forbid"}, rate=(float, 0.1))

    def configure() -> None:
        settings(learning_rate=0.1)

    failure = examine(configure, tmp_path)
    assert "Settings has rate: " in failure.remedy
    assert failure.container_exit_code == EXIT_USER_ERROR


def refuse_key() -> None:
    raise AuthenticationError("digest sent was rejected")


@pytest.mark.parametrize(
    "work",
    [
        release,
        count_down,
        lambda: re.compile("layer[0"),
        lambda: threading.Thread().join(),
        enter,
        refuse_key,
    ],
)
def test_local_computation_fails_in_each_attempt(work: Callable[[], object], tmp_path: Path) -> None:
    assert examine(work, tmp_path).container_exit_code == EXIT_USER_ERROR


def test_container_that_another_thread_may_change_is_no_mistake_of_its_loop(tmp_path: Path) -> None:
    stopped = threading.Event()
    other = threading.Thread(target=lambda: stopped.wait())
    other.start()
    try:
        failure = examine(drop_in_loop, tmp_path)
    finally:
        stopped.set()
        other.join()
    assert "iterate over" not in failure.remedy
    assert failure.container_exit_code == EXIT_RETRYABLE


class Lease:
    """A connection of a library, which its server has closed."""

    closed = False

    def __init__(self) -> None:
        self._closed = True

    def query(self) -> None:
        """Ask."""
        raise RuntimeError("connection is closed")


def test_what_a_peer_may_have_closed_is_no_mistake(tmp_path: Path) -> None:
    lease = Lease()
    failure = examine(lambda: lease.query(), tmp_path)
    assert "since line" not in failure.remedy
    assert failure.container_exit_code == EXIT_RETRYABLE


def test_exception_without_the_frames_of_another_interpreter_names_the_line_there(tmp_path: Path) -> None:
    text = '\n"""\nTraceback (most recent call last):\n  File "/app/data.py", line 7, in parse\n    check(number)\n'
    remote = type("_RemoteTraceback", (Exception,), {"__module__": "joblib.externals.loky.process_executor"})

    def join() -> None:
        error = ValueError("bad record 7")
        raise error from remote(f'{text}ValueError: bad record 7\n"""')

    assert "`check(number)`" in examine(join, tmp_path).remedy
