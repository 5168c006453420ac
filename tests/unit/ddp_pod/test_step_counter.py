"""The counters of a rank, with PyTorch's real optimizers and modules in this process."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from ddp_pod.rank import losses, steps
from ddp_pod.rank.counter_slots import open_slot
from ddp_pod.rank.counters import CounterMemory, RankCounters
from ddp_pod.rank.part import CreateSampler, RankPart, find_sampler
from ddp_pod.rank.steps import StepCounter

Read = Callable[[], RankCounters]


@contextmanager
def counting(folder: Path, create_sampler: CreateSampler | None = None) -> Iterator[Read]:
    """Count in this process, and return a function that reads the counters."""
    memory = CounterMemory(str(folder), 2)
    slot = open_slot(str(folder), 1)
    slot[steps.counters.PID] = float(os.getpid())
    backward = torch.Tensor.backward
    set_epoch = DistributedSampler.set_epoch
    counter = StepCounter(slot, create_sampler=create_sampler)
    counter.watch(sys.modules["torch.optim.optimizer"])

    def read() -> RankCounters:
        counters = memory.read(1)
        assert counters is not None
        return counters

    yield read
    counter.stop()
    torch.Tensor.backward = backward  # type: ignore[method-assign]
    DistributedSampler.set_epoch = set_epoch  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def no_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read everything at every step."""
    for name in ("_SAMPLE_SECONDS", "_LOOK_SECONDS", "_BATCH_SECONDS"):
        monkeypatch.setattr(steps, name, 0.0)
    monkeypatch.setattr(losses, "_SECONDS", 0.0)


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    with counting(tmp_path) as read:
        yield read


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, batch: int = 4, accumulate: int = 1) -> float:
    """Train and return the last loss of a batch."""
    loss = torch.zeros(())
    for _ in range(count):
        for _ in range(accumulate):
            loss = nn.functional.cross_entropy(model(torch.randn(batch, 8)), torch.zeros(batch, dtype=torch.long))
            (loss / accumulate if accumulate > 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def test_plain_loop_counts_steps_samples_rate_and_loss(read: Read) -> None:
    model = build_model()
    loss = train(model, torch.optim.SGD(model.parameters(), lr=0.25), 5)
    counters = read()
    assert (counters.steps, counters.samples, counters.learning_rate) == (5, 20, 0.25)
    assert counters.loss == pytest.approx(loss)
    assert counters.is_counted
    assert counters.step_seconds > (counters.work_seconds or 0) > 0


def test_changed_batch_size_counts_former_samples_with_former_size(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 5, batch=4)
    train(model, optimizer, 5, batch=6)
    assert read().samples == 5 * 4 + 5 * 6


def test_accumulated_batches_are_one_step_with_all_samples_and_undivided_loss(read: Read) -> None:
    model = build_model()
    loss = train(model, torch.optim.SGD(model.parameters(), lr=0.0), 4, accumulate=3)
    counters = read()
    assert (counters.steps, counters.samples) == (4, 4 * 3 * 4)
    assert counters.loss == pytest.approx(loss)


def test_loss_scale_of_a_grad_scaler_is_removed(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = model(torch.randn(4, 8)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert read().loss == pytest.approx(float(loss.detach()))


def test_skipped_step_of_a_grad_scaler_does_not_count(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, math.inf, 1.0):
        scaler.scale(model(torch.randn(4, 8)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert read().steps == 2


def test_gan_counts_iterations_and_no_ambiguous_samples(read: Read) -> None:
    generator = nn.Linear(2, 8)
    critic = nn.Linear(8, 1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    for _ in range(6):
        (critic(torch.randn(4, 8)).mean() - critic(generator(torch.randn(4, 2)).detach()).mean()).backward()
        of_critic.step()
        critic(generator(torch.randn(4, 2))).mean().backward()
        of_generator.step()
    assert (read().steps, read().samples) == (6, None)


@pytest.mark.parametrize("is_kept", [True, False])
def test_new_optimizer_of_a_second_phase_continues_the_count(read: Read, is_kept: bool) -> None:
    model = build_model()
    kept = []
    for _ in range(3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept += [optimizer] if is_kept else []
        train(model, optimizer, 5)
    assert read().steps == 15


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # by LBFGS of torch 2.8
def test_closure_of_lbfgs_counts_once(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs = torch.randn(4, 8)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)  # type: ignore[arg-type]
    assert read().steps == 3


class CallingBase(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Replacing(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:
        return None


@pytest.mark.parametrize("kind", [CallingBase, Replacing])
def test_own_optimizer_class_counts_once(read: Read, kind: Any) -> None:
    model = build_model()
    torch.optim.SGD(model.parameters(), lr=0.1)  # its step calls the hooks from here on
    train(model, kind(model.parameters()), 4)
    assert read().steps == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_compiled_model_and_optimizer_are_counted_without_a_warning(read: Read) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(4):
        compiled(torch.randn(4, 8)).sum().backward()
        step()
    assert (read().steps, read().samples) == (4, None)
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize(
    ("kind", "made", "position"), [(torch.optim.Adam, 0, 0), (torch.optim.Adam, 7, 7), (torch.optim.SGD, 7, None)]
)
def test_loaded_state_of_the_optimizer_shows_the_first_step(
    tmp_path: Path, kind: Any, made: int, position: int | None
) -> None:
    model = build_model()
    former = kind(model.parameters(), lr=0.1)
    train(model, former, made)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.load_state_dict(former.state_dict())
    with counting(tmp_path) as read:
        train(model, optimizer, 3)
        assert (read().steps, read().first_step) == (3, position)


def test_epoch_of_the_sampler_is_published(read: Read) -> None:
    assert read().epoch is None
    DistributedSampler(range(4), num_replicas=2, rank=0).set_epoch(3)  # type: ignore[arg-type]
    assert read().epoch == 4


def test_plan_of_lightning_is_published(read: Read, tmp_path: Path) -> None:
    """A loop of Lightning is recognized by the place of its file."""
    source = "class Loop:\n    def __init__(self, trainer): self.trainer = trainer\n    def run(self, work): work()\n"
    names: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "lightning" / "pytorch" / "loops" / "fit_loop.py"), "exec"), names)
    trainer = SimpleNamespace(current_epoch=2, max_epochs=8, estimated_stepping_batches=400, global_step=100)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names["Loop"](trainer).run(lambda: train(model, optimizer, 2))
    assert (read().epoch, read().epochs, read().total_steps, read().first_step) == (3, 8, 400, 100)
    endless = SimpleNamespace(current_epoch=3, max_epochs=-1, estimated_stepping_batches=math.inf, global_step=0)
    names["Loop"](endless).run(lambda: train(model, optimizer, 1))
    assert (read().epoch, read().total_steps) == (4, 400)


def test_loss_that_is_not_finite_is_published_with_its_step(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    assert read().lost_loss_step is None
    for _ in range(2):
        (model(torch.randn(4, 8)).sum() * math.nan).backward()
        optimizer.step()
    assert read().lost_loss_step == 3


def test_exception_in_a_hook_does_not_reach_the_script(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> float:
        raise RuntimeError("a bug")

    model = build_model()
    monkeypatch.setattr(steps, "_find_first_step", fail)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    assert read().steps == 1


def test_validation_counts_neither_steps_nor_samples(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            model(torch.randn(100, 8))
        model.train()
    assert (read().steps, read().samples) == (3, 12)


def test_model_called_with_keywords_shows_its_batch(read: Read) -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, *, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs)  # type: ignore[no-any-return]

    model = Keywords()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(inputs=torch.randn(5, 8)).sum().backward()
        optimizer.step()
    assert read().samples == 15


def test_forked_child_leaves_the_counters_of_its_parent(read: Read) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    child = os.fork()
    if not child:
        train(model, optimizer, 5)
        os._exit(0)
    os.waitpid(child, 0)
    assert read().steps == 2


def test_hostile_slot_gives_finite_counters(tmp_path: Path) -> None:
    memory = CounterMemory(str(tmp_path), 1)
    slot = open_slot(str(tmp_path), 0)
    for value in (math.nan, math.inf, -math.inf, -1.0, 1e300):
        for index in range(len(slot)):
            slot[index] = value
        slot[steps.counters.PID] = 1.0
        counters = memory.read(0)
        assert counters is not None
        numbers = [number for name, number in counters._asdict().items() if name != "loss" and number is not None]
        assert all(map(math.isfinite, numbers))


def test_slots_of_two_ranks_are_apart(tmp_path: Path) -> None:
    memory = CounterMemory(str(tmp_path), 2)
    for rank in (0, 1):
        slot = open_slot(str(tmp_path), rank)
        slot[steps.counters.PID] = 10.0 + rank
    assert {rank: counters.pid for rank, counters in memory.read_all().items()} == {0: 10, 1: 11}


@pytest.mark.parametrize(("is_capturing", "expected"), [(False, (3, None, True)), (True, (0, None, False))])
def test_rank_with_a_gpu_measures_no_own_work_and_counts_no_captured_step(
    read: Read, monkeypatch: pytest.MonkeyPatch, is_capturing: bool, expected: tuple[int, None, bool]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    model = build_model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    counters = read()
    assert (counters.steps, counters.work_seconds, counters.is_counted) == expected
    assert counters.is_recorded is is_capturing


def test_capture_between_two_observed_iterations_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr(steps, "_SAMPLE_SECONDS", 1e9)
    monkeypatch.setattr(steps, "_BATCH_SECONDS", 1e9)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counting(tmp_path) as read:
        train(model, optimizer, 5)
        capturing[0] = True
        train(model, optimizer, 2)
        assert (read().steps, read().is_recorded) == (5, True)


def test_seldom_observed_iterations_count_as_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(steps, "_now", lambda: now[0])
    monkeypatch.setattr(losses.time, "monotonic", lambda: now[0])
    for name, seconds in {"_SAMPLE_SECONDS": 5.0, "_LOOK_SECONDS": 5.0, "_PAUSE_SECONDS": 30.0}.items():
        monkeypatch.setattr(steps, name, seconds)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counting(tmp_path) as read:
        for _ in range(20):
            loss = model(torch.randn(4, 8)).sum()
            now[0] += 0.25  # the rank's own work
            loss.backward()
            now[0] += 0.75
            optimizer.step()
        now[0] += 40  # a validation, and a step after it
        optimizer.step()
        counters = read()
    assert counters.steps == 21
    assert counters.longest_step == 40
    assert counters.step_seconds == pytest.approx(21)
    assert counters.work_seconds == pytest.approx(0.25 * 19, abs=0.25 * 5)
    assert counters.samples == 21 * 4


def test_sampler_that_cannot_start_leaves_the_steps_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    with counting(tmp_path, find_sampler([RankPart(), RankPart(sample=fail)])) as read:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert read().steps == 1
    assert "internal error of the launcher in a rank, sample" in capfd.readouterr().err


def test_rank_without_sampling_feature_has_no_sampler() -> None:
    assert find_sampler([RankPart()]) is None
