"""Export of the trained model: safetensors, torch.export and ONNX."""

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp_trainer.errors import UserError, require
from ddp_trainer.files import replacing, writable
from ddp_trainer.models.cpu_convolutions import SlicedConv2d

# File suffix -> the modules that writing needs besides torch.
_FORMATS = {".safetensors": ["safetensors"], ".pt2": [], ".onnx": ["onnx", "onnxscript"]}


def check_export(paths: Sequence[str]) -> None:
    """Raise :class:`UserError` for a file of unknown format, with a missing library, or in a folder without access."""
    for path in map(Path, paths):
        require(
            path.suffix in _FORMATS,
            "export",
            f"{path} has none of the suffixes {', '.join(_FORMATS)}",
            "choose the format by one of them",
        )
        missing = [name for name in _FORMATS[path.suffix] if importlib.util.find_spec(name) is None]
        require(not missing, "export", f"writing {path} needs {' and '.join(missing)}", "install them with pip")
        with writable(path.parent, "export"):
            path.parent.mkdir(parents=True, exist_ok=True)


def export_model(model: nn.Module, inputs: Any, paths: Sequence[str]) -> None:
    """Write ``model`` in evaluation mode, in float32 on the CPU, to ``paths``; ``inputs`` is an example of a batch.

    The exported model accepts batches of any size. Raises :class:`UserError` if the model can't be exported or written.
    """
    model = copy.deepcopy(model).cpu().eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, SlicedConv2d):  # it depends on the input's size
            module.__class__ = nn.Conv2d  # type: ignore[assignment]
    # torch.export treats a batch size of one as a constant.
    pair = tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor])[:2].cpu().contiguous(), inputs)
    program: Any = None
    for path in map(Path, paths):
        try:
            if program is None and path.suffix != ".safetensors":
                sizes = tree_map_only(Tensor, lambda _: {0: torch.export.Dim.DYNAMIC}, pair)
                with torch.no_grad():
                    program = torch.export.export(model, (pair,), dynamic_shapes=(sizes,))
            with replacing(path) as file:
                _write(file, path.suffix, model, program)
        except OSError as error:
            raise UserError("export", f"cannot write to {path}: {error}", "give another folder") from error
        except Exception as error:  # torch.export documents no exception types
            reason = " ".join(str(error).split())[:300]
            raise UserError("export", f"the model can't be exported to {path}: {reason}", "use .safetensors") from error


def _write(file: IO[bytes], format: str, model: nn.Module, program: Any) -> None:
    match format:
        case ".safetensors":
            from safetensors.torch import save

            # Cloned, so that a parameter that several modules share is written under each of its names.
            file.write(save({name: tensor.clone() for name, tensor in model.state_dict().items()}))
        case ".pt2":
            torch.export.save(program, file)
        case ".onnx":
            file.write(torch.onnx.export(program, dynamo=True, verbose=False).model_proto.SerializeToString())  # type: ignore[union-attr]
