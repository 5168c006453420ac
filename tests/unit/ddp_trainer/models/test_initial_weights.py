"""Training starts from the weights of a file where they fit the model, and reports those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_trainer.api import Trainer
from ddp_trainer.cli import parse
from ddp_trainer.distributed.world import RankEnv
from ddp_trainer.errors import UserError
from ddp_trainer.imports import import_torchvision
from ddp_trainer.models import ModelConfig, build_model
from ddp_trainer.models.initial_weights import download_weights, load_weights, read_weights
from tests.support.trainer_plugins import COLOURED

SMALL = ModelConfig(width=4)


def save(path: Path, content: Any) -> str:
    torch.save(content, path)
    return str(path)


@pytest.mark.parametrize("wrap", ["{}", "module.{}", "module._orig_mod.{}"])
@pytest.mark.parametrize("nested", [None, "state_dict", "model"])
def test_state_dict_is_loaded_with_any_wrapping(tmp_path: Path, wrap: str, nested: str | None) -> None:
    inputs = build_model(SMALL, 3, 5)
    model = build_model(SMALL, 3, 5)
    state: dict[str, Any] = {wrap.format(name): tensor for name, tensor in inputs.state_dict().items()}
    source = save(tmp_path / "model.pt", {nested: state, "epoch": 3} if nested else state)
    line = load_weights(model, read_weights(source), source)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in inputs.state_dict().items())
    count = len(state)
    assert line == f"initial weights: {count} of {count} tensors from {source}"


def test_head_for_other_classes_is_reinitialised_and_named(tmp_path: Path) -> None:
    source = build_model(SMALL, 3, 5)
    model = build_model(SMALL, 3, 7)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    line = load_weights(model, source.state_dict(), "there.pt")
    new = [name for name, tensor in own.items() if tensor.shape != source.state_dict()[name].shape]
    assert new
    assert line.endswith(f"; random: {', '.join(new)}")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, own[name] if name in new else source.state_dict()[name]), name


@pytest.mark.parametrize("name", ["network", "network.backbone"])
def test_network_in_known_module_uses_own_names(name: str) -> None:
    linear = nn.Linear(2, 2)
    within = nn.Linear(2, 2)
    model = nn.Module()
    around = nn.ModuleDict({"backbone": within, "classifier": nn.Linear(2, 2)})
    model.add_module("network", within if name == "network" else around)
    load_weights(model, linear.state_dict(), "there.pt")
    assert torch.equal(within.weight, linear.weight)


def test_safetensors_are_read_and_missing_tensors_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file({"weight": torch.ones(2)}, path)
    assert torch.equal(read_weights(str(path))["weight"], torch.ones(2))
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"^model\.init_from: .*model\.safetensors can't be read"):
        read_weights(str(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"lr": 0.1}, "holds no named tensors"),
        ({0: torch.ones(1), "weight": torch.ones(1)}, "holds no named tensors"),
        ([torch.ones(1)], "holds no named tensors"),
        ({"path": Path("a"), "weight": torch.ones(1)}, "holds more than tensors"),
    ],
)
def test_file_without_state_dict_is_refused(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_weights(save(tmp_path / "model.pt", content))


@pytest.mark.parametrize("text", [None, b"", b"not a model", b"hello\n", b"the quick\n"])
def test_file_that_is_none_is_refused(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "model.pt").write_bytes(text)
    with pytest.raises(UserError, match=r"^model\.init_from: "):
        read_weights(str(tmp_path / "model.pt"))


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(UserError, match=r"no tensor of there\.pt \(weight, bias, …\) has the name and shape"):
        load_weights(build_model(SMALL, 3, 5), nn.Linear(2, 2).state_dict(), "there.pt")


def test_torchvision_weights_are_read_from_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", _no_network)
    with pytest.raises(
        UserError,
        match=r"ResNet18_Weights\.DEFAULT is not in .*, and its .*; copy https://.*resnet18.* into",
    ):
        read_weights("ResNet18_Weights.DEFAULT")
    with pytest.raises(UserError, match=r"torchvision has no Nothing_Weights\.DEFAULT"):
        read_weights("Nothing_Weights.DEFAULT")
    source = {"fc.weight": torch.ones(2)}
    asked = []
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *args, **named: asked.append(named) or source
    )
    download_weights("ResNet18_Weights.DEFAULT")
    assert read_weights("ResNet18_Weights.DEFAULT") == source
    assert asked == [{"progress": False, "check_hash": True}] * 2


def test_only_torchvisions_weights_are_downloaded_early() -> None:
    download_weights("nowhere/model.pt")  # each rank reads the file once, then names it


def test_first_of_many_new_tensors_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(6)))
    source = {"0.weight": torch.ones(1, 1)}
    assert load_weights(model, source, "it").endswith("; random: 1.weight, 2.weight, 3.weight, 4.weight, …")
    assert load_weights(model[:5], source, "it").endswith("; random: 1.weight, 2.weight, 3.weight, 4.weight")


def _no_network(*args: object, **named: object) -> None:
    raise OSError("no route to host")


def test_new_run_starts_from_weights_and_resumed_one_from_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["--data", COLOURED, "--model-width", "4", "--batch-size", "25", "--device", "cpu", "--metrics-port", "0"]

    def train(*more: str, lr: str = "1e-30") -> dict[str, torch.Tensor]:
        Trainer(parse([*base, "--lr", lr, "--output-dir", "out", *more]), env=RankEnv()).fit()
        load: dict[str, torch.Tensor] = torch.load("out/model.pt", weights_only=True)
        return load

    first = train("--seed", "1")
    Path("out/model.pt").rename("first.pt")
    started = train("--seed", "2", "--init-from", "first.pt", "--checkpoint-dir", "kept")
    assert torch.equal(_weight(started), _weight(first))
    assert "initial weights: " in capsys.readouterr().out
    again = train("--seed", "2", "--init-from", "first.pt", "--checkpoint-dir", "kept", "--epochs", "2", lr="0.5")
    torch.save({name: torch.zeros_like(tensor) for name, tensor in first.items()}, "first.pt")
    more = train("--seed", "2", "--init-from", "first.pt", "--checkpoint-dir", "kept", "--epochs", "2", lr="0.5")
    assert torch.equal(_weight(again), _weight(more))


def _weight(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(tensor for name, tensor in state.items() if name.endswith("weight"))
