"""The trained model in files for other programs: safetensors, torch.export's and ONNX."""

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
from ddp_trainer.models.cpu_convolutions import SlicedConv2d, SmallMapConv2d

# ending -> the modules that writing it needs besides torch
_FORMATS = {".safetensors": ["safetensors"], ".pt2": [], ".onnx": ["onnx", "onnxscript"]}


def check_export(paths: Sequence[str]) -> None:
    """Raise :class:`UserError` for a file of no known format, or whose folder or libraries are not there."""
    for path in map(Path, paths):
        known = ", ".join(_FORMATS)
        require(path.suffix in _FORMATS, "export", f"{path} has none of the endings {known}", "name the format by one")
        missing = [name for name in _FORMATS[path.suffix] if importlib.util.find_spec(name) is None]
        require(not missing, "export", f"writing {path} needs {' and '.join(missing)}", "install them with pip")
        with writable(path.parent, "export"):
            path.parent.mkdir(parents=True, exist_ok=True)


def export_model(model: nn.Module, inputs: Any, paths: Sequence[str]) -> None:
    """Write ``model`` as it evaluates, in float32 on the CPU, to ``paths``; ``inputs`` are an example of a batch.

    Its batches may have any size. Raises :class:`UserError` where the model can't be exported or written.
    """
    model = copy.deepcopy(model).cpu().eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, SmallMapConv2d | SlicedConv2d):  # another way of computing, chosen by an input's size
            module.__class__ = nn.Conv2d  # type: ignore[assignment]
    # Of one sample torch would take the size for a constant.
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
            raise UserError("export", f"cannot write to {path}: {error}", "choose another folder") from error
        except Exception as error:  # torch.export promises nothing about what it cannot trace
            reason = " ".join(str(error).split())[:300]
            raise UserError("export", f"the model can't be exported to {path}: {reason}", "use .safetensors") from error


def _write(file: IO[bytes], format: str, model: nn.Module, program: Any) -> None:
    match format:
        case ".safetensors":
            from safetensors.torch import save

            # Cloned: parameters that several modules share are written as often, as any reader expects them.
            file.write(save({name: tensor.clone() for name, tensor in model.state_dict().items()}))
        case ".pt2":
            torch.export.save(program, file)
        case ".onnx":
            file.write(torch.onnx.export(program, dynamo=True, verbose=False).model_proto.SerializeToString())  # type: ignore[union-attr]
