"""``MemoryCheckpoint`` in one process."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_sdk.memory import MemoryCheckpoint, checkpoint, writer


class Run:
    """A model in training, and its copies in ``folder``."""

    def __init__(self, folder: Path | None, width: int = 8, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.objects: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
        }  # fmt: skip
        self.memory = MemoryCheckpoint(
            self.objects, folder=None if folder is None else str(folder), **{"interval": 1, **options}
        )

    def step(self, step: int) -> None:
        torch.manual_seed(step)
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 4)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.step(step)
            self.memory.save(step + 1)

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({name: item.state_dict() for name, item in self.objects.items()})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def end(run: Run) -> None:
    """End a process without its exit handlers."""
    run.memory.close()


def find_steps(folder: Path) -> set[int]:
    """Return the steps of which a copy exists, as another process reads them."""
    headers = [checkpoint.CopyFile(str(path)).header for path in folder.glob("pod-0/*")]
    return {header.step for header in headers if header is not None}


def test_restored_state_is_equal_to_the_bit(tmp_path: Path) -> None:
    first = Run(tmp_path)
    assert first.memory.restore() is None
    first.train(0, 5)
    end(first)
    read = Run(tmp_path)
    assert read.memory.restore() == 5
    read.step(5)  # changes the loaded tensors, which are not the memory of the copy
    end(read)
    second = Run(tmp_path)
    assert second.memory.restore() == 5
    assert equal(second.state(), first.state())
    second.train(5, 8)
    undisturbed = Run(None)
    undisturbed.memory.restore()
    undisturbed.train(0, 8)
    assert equal(second.state(), undisturbed.state())
    end(second)


def test_copy_that_was_interrupted_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(tmp_path)
    first.memory.restore()
    first.train(0, 3)
    first.memory.fence()
    expected = first.state()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed here")

    first.memory._session._writer.wait(10)  # type: ignore[union-attr]
    monkeypatch.setattr(writer, "build_header", fail)
    first.train(3, 4)
    end(first)
    second = Run(tmp_path)
    assert second.memory.restore() == 3
    assert equal(second.state(), expected)
    end(second)


def test_damaged_copy_falls_back_to_the_one_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = Run(tmp_path)
    first.memory.restore()
    first.train(0, 4)
    end(first)
    newest = max((tmp_path / "pod-0").iterdir(), key=lambda path: checkpoint.CopyFile(str(path)).header.step)  # type: ignore[union-attr]
    with open(newest, "r+b") as file:
        file.seek(4096 + 8)
        file.write(b"damaged!")
    second = Run(tmp_path)
    assert second.memory.restore() == 3
    assert "the copy of step 4 in pod 0 is damaged; it is not used" in capfd.readouterr().err
    end(second)


def test_memory_changed_by_the_next_step_is_the_state_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step must wait until its parameters are copied, if the save before it has not."""
    copied = writer.copy_memory

    def copy_slowly(address: int, source: torch.Tensor, size: int) -> None:
        copied(address, source, size // 2)
        time.sleep(0.02)
        copied(address, source, size)

    first = Run(tmp_path, interval=None)
    first.memory.restore()
    first.train(0, 2)
    monkeypatch.setattr(writer, "copy_memory", copy_slowly)
    first.train(2, 3)
    assert not find_steps(tmp_path) & {3}
    expected = first.state()
    first.step(3)
    end(first)
    second = Run(tmp_path)
    assert second.memory.restore() == 3
    assert equal(second.state(), expected)
    assert first.memory.stalled_seconds > 0
    end(second)


def test_save_with_fixed_interval_returns_when_its_copy_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = writer.copy_memory

    def copy_slowly(address: int, source: torch.Tensor, size: int) -> None:
        time.sleep(0.02)
        copied(address, source, size)

    monkeypatch.setattr(writer, "copy_memory", copy_slowly)
    run = Run(tmp_path)
    run.memory.restore()
    for step in range(3):
        run.train(step, step + 1)
        assert max(find_steps(tmp_path)) == step + 1
    assert run.memory.stalled_seconds > 0
    end(run)


def test_parameter_changed_outside_of_a_step_discards_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.memory.restore()
    run.train(0, 2)
    copied = writer.copy_memory

    def change_meanwhile(address: int, source: torch.Tensor, size: int) -> None:
        copied(address, source, size)
        with torch.no_grad():
            run.model[0].weight.add_(1.0)  # type: ignore[operator]

    session = run.memory._session
    assert session is not None
    assert session._writer is not None
    session._writer.wait(10)
    monkeypatch.setattr(writer, "copy_memory", change_meanwhile)
    run.train(2, 3)
    session._writer.wait(10)
    monkeypatch.setattr(writer, "copy_memory", copied)
    run.train(3, 5)
    assert "changed outside of an optimizer's step" in capfd.readouterr().err
    expected = run.state()
    end(run)
    second = Run(tmp_path)
    assert second.memory.restore() == 5
    assert equal(second.state(), expected)
    end(second)


def test_no_room_warns_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "find_available", lambda folder: 100)
    run = Run(tmp_path)
    run.memory.restore()
    run.train(0, 3)
    printed = capfd.readouterr().err
    assert printed.count("MiB of memory") == 1
    assert "Training continues with its checkpoints on disk" in printed
    end(run)


def test_non_finite_state_is_never_restored(tmp_path: Path) -> None:
    run = Run(tmp_path, finite_only=True)
    run.memory.restore()
    run.train(0, 3)
    expected = run.state()
    with torch.no_grad():
        run.memory.fence()
        run.model[0].weight[0, 0] = float("nan")  # type: ignore[index]
    run.train(3, 6)
    end(run)
    second = Run(tmp_path, finite_only=True)
    assert second.memory.restore() == 3
    assert equal(second.state(), expected)
    end(second)


def test_model_of_another_shape_does_not_take_the_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = Run(tmp_path)
    first.memory.restore()
    first.train(0, 2)
    end(first)
    second = Run(tmp_path, width=9)
    before = second.state()
    assert second.memory.restore() is None
    assert "model.0.bias has the shape (9,), in the copy (8,)" in capfd.readouterr().err
    assert equal(second.state(), before)
    second.train(0, 1)
    end(second)


def test_other_objects_do_not_take_the_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = Run(tmp_path)
    first.memory.restore()
    first.train(0, 2)
    end(first)
    model = torch.nn.Linear(4, 8)
    second = MemoryCheckpoint({"network": model}, folder=str(tmp_path))
    assert second.restore() is None
    assert "it contains the state of model, optimizer, scheduler, not of network" in capfd.readouterr().err
    second.close()


def test_older_copy_than_the_disk_is_ignored(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.memory.restore()
    first.train(0, 3)
    end(first)
    second = Run(tmp_path)
    assert second.memory.restore(at_least=4) is None
    second.memory.close()
    third = Run(tmp_path)
    assert third.memory.restore() is None  # the copies of an abandoned course of the run are invalid
    end(third)


@pytest.mark.parametrize(("newest", "restored"), [(2, 3), (3, 3), (4, None)])
def test_limit_may_depend_on_newest_own_copy(tmp_path: Path, newest: int, restored: int | None) -> None:
    first = Run(tmp_path)
    first.memory.restore()
    first.train(0, 3)
    end(first)
    held: list[int] = []
    second = Run(tmp_path)
    assert second.memory.restore(at_least=lambda step: held.append(step) or newest) == restored  # type: ignore[func-returns-value]
    assert held == [3]
    end(second)


def test_rank_that_copies_everything_at_once_broadcasts_as_much_as_its_peers(tmp_path: Path) -> None:
    class TwoRanks:
        device = torch.device("cpu")

        def broadcast(self, memory: torch.Tensor) -> None:
            sizes.append(memory.numel())

    sizes: list[int] = []
    run = Run(tmp_path)
    run.memory.restore()
    run.train(0, 2)
    session = run.memory._session
    assert session is not None
    state = session._read_state()
    session._ranks = TwoRanks()  # type: ignore[assignment]
    session._place = session._place._replace(world=2)
    session._saves_everywhere = True
    delayed = session._list_volatile(state)
    session._is_asynchronous = False
    at_once = session._list_volatile(state)
    assert sizes[0] == sizes[1] > 0
    assert None in delayed
    assert None not in at_once
    end(run)


def test_growing_state_is_copied(tmp_path: Path) -> None:
    class Log:
        def __init__(self) -> None:
            self.entries: list[int] = []
            self.tensor = torch.zeros(1)

        def state_dict(self) -> dict[str, Any]:
            return {"entries": self.entries, "tensor": self.tensor}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.entries = state["entries"]
            self.tensor = state["tensor"]

    log = Log()
    memory = MemoryCheckpoint({"log": log}, folder=str(tmp_path), interval=1)
    memory.restore()
    for step in range(1, 8):
        log.entries.extend(range(10 * step))
        log.tensor = torch.full((4**step,), float(step))
        memory.save(step)
    memory.close()
    other = Log()
    again = MemoryCheckpoint({"log": other}, folder=str(tmp_path))
    assert again.restore() == 7
    assert other.entries == log.entries
    assert torch.equal(other.tensor, log.tensor)
    again.close()


def test_without_folder_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(checkpoint.ENV_MEMORY_DIR, raising=False)
    run = Run(None)
    run.memory.save(1)
    assert not run.memory.is_active
    assert run.memory.restore() is None


def test_folder_and_interval_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoint.ENV_MEMORY_DIR, str(tmp_path))
    monkeypatch.setenv(checkpoint.ENV_MEMORY_INTERVAL, "3")
    run = Run(None, interval=None)
    run.memory.restore()
    run.train(0, 5)
    end(run)
    assert run.memory.interval == 3
    again = Run(None)
    assert again.memory.restore() == 3
    end(again)


class FullyShardedDataParallel(torch.nn.Module):
    """Stands in for torch's class, which needs a process group."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise AssertionError("a collective operation")


def test_fsdp1_is_refused_with_a_message_and_training_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(2, 2)))
    memory = MemoryCheckpoint({"model": model}, folder=str(tmp_path))
    assert memory.restore() is None
    for step in (1, 2):
        memory.save(step)
    memory.close()
    assert not memory.is_active
    assert list(tmp_path.iterdir()) == []
    message = capfd.readouterr().err
    assert message.count("model uses FullyShardedDataParallel (FSDP1)") == 1
    assert "Use torch.distributed.fsdp.fully_shard (FSDP2)" in message


@pytest.mark.parametrize("attack", ["link", "open folder", "link above", "open folder above"])
def test_folder_that_others_prepared_is_refused(tmp_path: Path, attack: str) -> None:
    folder = tmp_path / "memory"
    planted = folder if attack.endswith("above") else folder / "pod-0"
    (tmp_path / "private").mkdir(mode=0o700)
    planted.parent.mkdir(mode=0o700, exist_ok=True)
    if attack.startswith("link"):
        planted.symlink_to(tmp_path / "private")
    else:
        planted.mkdir()
        planted.chmod(0o777)
    memory = MemoryCheckpoint({"model": torch.nn.Linear(1, 1)}, folder=str(folder))
    with pytest.raises(PermissionError, match="is a link or open to other users"):
        memory.restore()
    assert list((tmp_path / "private").iterdir()) == []


def test_wrong_calls_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"save\(\) needs restore\(\)"):
        Run(tmp_path).memory.save(1)
    with pytest.raises(TypeError, match="data is a list without state_dict"):
        MemoryCheckpoint({"data": []})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="interval is 0"):
        Run(tmp_path, interval=0)
    run = Run(tmp_path)
    run.memory.restore()
    with pytest.raises(RuntimeError, match=r"restore\(\) has been called before"):
        run.memory.restore()
    end(run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        Run(tmp_path).memory.restore()
