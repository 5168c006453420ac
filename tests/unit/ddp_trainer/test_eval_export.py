"""Validation without training, and export of the trained model to other formats."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddp_trainer.cli import main
from ddp_trainer.errors import UserError
from ddp_trainer.models import ModelConfig, build_model, export
from ddp_trainer.models.cpu_convolutions import slice_before_narrow_convolutions
from ddp_trainer.models.export import export_model
from tests.support import trainer_plugins as plugins
from tests.support.saved_states import load

DIGITS = [
    "--preset", "digits-resnet", "--model-width", "4", "--batch-size", "64", "--device", "cpu", "--metrics-port", "0",
]  # fmt: skip


def said_scores(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the scores of the last printed validation."""
    return re.findall(r"validation: (.*) in ", capsys.readouterr().out)[-1]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_validation_of_weights_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["--checkpoint-dir", str(tmp_path / "kept")]
    peers = ["--log-dir", str(tmp_path / "logs"), "--csv-dir", str(tmp_path / "csv")]
    # The validated average is a different model from the one in training.
    assert main([*DIGITS, *kept, *peers, "--max-steps", "20", "--ema-decay", "0.99"]) == 0
    expected = said_scores(capsys)
    before = contents(tmp_path)
    # An attempt that runs in the folder is not disturbed; settings of the training have no effect.
    monkeypatch.setenv("DDP_ATTEMPT", "9")
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert main([*DIGITS, *kept, *peers, "--eval-only", "--optimizer", "adamw", "--resume", "never"]) == 0
    assert said_scores(capsys) == expected
    page = (tmp_path / "runtime" / "metrics" / "0.prom").read_text()
    assert f'ddp_validation_accuracy_ratio{{rank="0"}} {expected.split()[-1]}'[:-2] in page
    assert {path: data for path, data in contents(tmp_path).items() if "runtime" not in path.parts} == before
    assert main([*DIGITS, "--init-from", str(tmp_path / "kept" / "model.pt"), "--eval-only", "--ema-decay", "0.5"]) == 0
    assert said_scores(capsys) == expected


def test_missing_weights_are_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        assert main([*DIGITS, "--eval-only", *arguments]) == 81
        return capsys.readouterr().err

    assert "eval_only: no weights to validate; give a --checkpoint-dir" in refused()
    assert "none holds no checkpoint; give" in refused("--checkpoint-dir", str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    assert main([*DIGITS, "--max-steps", "1", "--output-dir", str(tmp_path)]) == 0
    weights = load(tmp_path / "model.pt")
    del weights["head.weight"]
    torch.save(weights, tmp_path / "part.pt")
    assert "lacks 1 of the model's" in refused("--init-from", str(tmp_path / "part.pt"))


def test_stopped_validation_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*DIGITS, "--model", plugins.INTERRUPTING, "--checkpoint-dir", str(tmp_path), "--eval-batch-size", "50"]
    assert main([*arguments, "--max-steps", "2"]) == 0
    before = contents(tmp_path)
    monkeypatch.setenv("TEST_INTERRUPT", "0:2:VALIDATIONSIGTERM")
    capsys.readouterr()
    assert main([*arguments, "--eval-only"]) == 85
    assert "nothing saved" in capsys.readouterr().out
    assert contents(tmp_path) == before


def test_run_and_validation_export_validated_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    paths = [str(tmp_path / "deep" / name) for name in ("model.safetensors", "model.pt2")]
    arguments = [*DIGITS, "--max-steps", "3", "--ema-decay", "0.9", "--precision", "bf16", "--channels-last"]
    assert main([*arguments, "--checkpoint-dir", str(tmp_path), "--export", ",".join(paths)]) == 0
    assert f"exported to {', '.join(paths)}" in capsys.readouterr().out
    weights = load(tmp_path / "model.pt")
    written = load_file(paths[0])
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    model = build_model(ModelConfig(width=4), 1, 10)
    model.load_state_dict(weights)
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    program = torch.export.load(paths[1])
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), model.eval()(images))
    again = str(tmp_path / "again.safetensors")
    assert main([*arguments, "--checkpoint-dir", str(tmp_path), "--eval-only", "--export", again]) == 0
    assert Path(again).read_bytes() == Path(paths[0]).read_bytes()
    # A run can start from the exported file.
    assert main([*DIGITS, "--init-from", paths[0], "--max-steps", "1"]) == 0
    assert f"initial weights: {len(weights)} of {len(weights)} tensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["resnet18", "wide-resnet"])
def test_networks_with_cpu_variants_are_exported_in_standard_form(name: str, tmp_path: Path) -> None:
    model = build_model(ModelConfig(name=name, widen=1, dropout=0.1), 3, 10)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    slice_before_narrow_convolutions(model)
    images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    export_model(model, images.to(memory_format=torch.channels_last), [str(tmp_path / "model.pt2")])
    assert model.training
    program = torch.export.load(str(tmp_path / "model.pt2")).module()
    with torch.no_grad():
        torch.testing.assert_close(program(images), model.eval()(images), rtol=1e-4, atol=1e-5)
        assert program(images.repeat(3, 1, 1, 1)).shape == (3, 10)


def test_onnx_computes_same(tmp_path: Path) -> None:
    for needed in ("onnx", "onnxscript"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = build_model(ModelConfig(width=4), 1, 10)
    images = torch.randn(5, 1, 8, 8)
    export_model(model, images, [str(tmp_path / "model.onnx")])
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model.eval()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("model.bin", "export: model.bin has none of the suffixes .safetensors, .pt2, .onnx; choose the format"),
        ("model.onnx", "export: writing model.onnx needs onnx and onnxscript; install them with pip"),
        ("file/model.pt2", "export: cannot write to file"),
    ],
)
def test_file_that_can_t_be_written_is_mistake_before_training(
    path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    assert main([*DIGITS, "--export", path]) == 81
    message = capsys.readouterr()
    assert words in message.err
    assert "step" not in message.out.partition("training:")[2]


class Branching(nn.Module):
    """A model whose outputs depend on a number in its inputs, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x.flatten(1))
        return outputs if float(x.sum()) < 1e9 else -outputs


def branching(config: ModelConfig, in_channels: int, num_classes: int) -> nn.Module:
    return Branching()


def test_model_that_can_t_be_traced_is_warned_of_after_training_and_refused_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "model.pt2")
    digits = [part for part in DIGITS if part not in ("--model-width", "4")]
    arguments = [*digits, "--model", f"{__name__}:branching", "--checkpoint-dir", str(tmp_path), "--export", path]
    assert main([*arguments, "--max-steps", "1"]) == 0
    message = capsys.readouterr()
    assert f"warning: export: the model can't be exported to {path}: " in message.err
    assert "done: 1 steps" in message.out
    assert main([*arguments, "--eval-only"]) == 81
    assert "use .safetensors" in capsys.readouterr().err
    assert not Path(path).exists()
    with pytest.raises(UserError, match="cannot write to"):
        export_model(Branching(), torch.zeros(2, 1, 8, 8), [f"{sys.executable}/model.safetensors"])
