"""Weights that training starts from: a file's or torchvision's, as far as they fit the model."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_trainer.errors import UserError, require
from ddp_trainer.imports import import_torchvision

_FIELD = "model.init_from"
_TORCHVISION = re.compile(r"\w+_Weights\.\w+")
# What DDP, torch.compile and networks around networks, such as one for segmentation, put before a parameter's own name.
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod|model|network|backbone)\.)+")
_NESTED = ("state_dict", "model_state_dict", "model")
_SHOWN = 4


def download_weights(source: str) -> None:
    """Put torchvision's weights of that name into its cache; a file is none. Raises :class:`UserError`."""
    if _TORCHVISION.fullmatch(source):
        _read_torchvision(source)


def read_weights(source: str) -> dict[str, Tensor]:
    """The tensors by name of a file (torch.save's or safetensors), or of torchvision's weights of that name.

    torchvision's are downloaded unless they are in its cache. Raises :class:`UserError` where they can't be had.
    """
    if _TORCHVISION.fullmatch(source):
        return _read_torchvision(source)
    try:
        found = _read_file(source)
    except ImportError as error:
        raise UserError(_FIELD, f"reading {source} needs safetensors", "pip install safetensors") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            _FIELD, f"{source} holds more than tensors, or is none of torch.save's files", "save model.state_dict()"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(_FIELD, f"{source} can't be read: {reason}", "give a file of model.state_dict()") from error
    except Exception as error:  # pickle reads text as instructions, which fail with any exception
        raise UserError(
            _FIELD,
            f"{source} is not a file of torch.save ({type(error).__name__})",
            "give a file of torch.save(model.state_dict(), …), or a .safetensors file",
        ) from error
    for name in _NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    tensors = {name: item for name, item in found.items() if isinstance(item, Tensor)} if named else {}
    require(bool(tensors), _FIELD, f"{source} holds no tensors by name", "save model.state_dict()")
    return tensors


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str, *, whole: bool = False) -> str:
    """Copy what has the name and the shape of a tensor of ``model``; returns a line that says what has kept its own.

    So a head for other classes is new. Raises :class:`UserError` where nothing fits, or, if ``whole``, not everything.
    """
    given = {_WRAPPERS.sub("", name): tensor for name, tensor in weights.items()}
    own = model.state_dict()
    fitting = {}
    for name, tensor in own.items():
        other = given.get(_WRAPPERS.sub("", name))
        if other is not None and other.shape == tensor.shape:
            fitting[name] = other
    names = ", ".join(list(given)[:_SHOWN])
    require(
        any(name in fitting for name, _ in model.named_parameters()),
        _FIELD,
        f"no tensor of {source} ({names}, …) has the name and the shape of one of the model's",
        "choose the model that they were saved from",
    )
    model.load_state_dict(fitting, strict=False)
    new = [name for name in own if name not in fitting]
    require(
        not (whole and new),
        "eval_only",
        f"{source} lacks {len(new)} of the model's {len(own)} tensors, first {', '.join(new[:_SHOWN])}",
        "choose the model and data that they were trained for",
    )
    line = f"initial weights: {len(fitting)} of {len(own)} tensors from {source}"
    return f"{line}; new: {', '.join(new[:_SHOWN])}{', …' if len(new) > _SHOWN else ''}" if new else line


def _read_file(source: str) -> Any:
    if Path(source).suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(source)
        except SafetensorError as error:
            raise ValueError(error) from error
    return torch.load(source, map_location="cpu", weights_only=True)


def _read_torchvision(source: str) -> dict[str, Tensor]:
    import_torchvision()
    from torchvision import models

    try:
        found = models.get_weight(source)
    except (AttributeError, KeyError, ValueError) as error:
        raise UserError(_FIELD, f"torchvision knows no {source}", "see torchvision.models.list_models()") from error
    try:
        return dict(found.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise UserError(
            _FIELD, f"{source} is neither in {folder} nor can it be downloaded: {error}", f"put {found.url} there"
        ) from error
