"""Initial weights from a file or from torchvision; tensors that don't fit the model are skipped."""

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
# Prefixes that DDP, torch.compile and wrapping networks, such as those for segmentation, add to a parameter's name.
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod|model|network|backbone)\.)+")
_NESTED = ("state_dict", "model_state_dict", "model")
_SHOWN = 4


def download_weights(source: str) -> None:
    """Download torchvision's weights of that name into its cache; do nothing for a file.

    Raises :class:`UserError` if torchvision does not know the name or the download fails.
    """
    if _TORCHVISION.fullmatch(source):
        _read_torchvision(source)


def read_weights(source: str) -> dict[str, Tensor]:
    """Read named tensors from a file (torch.save or safetensors) or from torchvision's weights of that name.

    Torchvision's weights are downloaded unless they are cached. Raises :class:`UserError` if they can't be read.
    """
    if _TORCHVISION.fullmatch(source):
        return _read_torchvision(source)
    try:
        content = _read_file(source)
    except ImportError as error:
        raise UserError(_FIELD, f"reading {source} needs safetensors", "pip install safetensors") from error
    except pickle.UnpicklingError as error:
        raise UserError(
            _FIELD, f"{source} holds more than tensors, or was not written by torch.save", "save model.state_dict()"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(_FIELD, f"{source} can't be read: {reason}", "give a file of model.state_dict()") from error
    except Exception as error:  # pickle executes any bytes as instructions, which may raise any exception
        raise UserError(
            _FIELD,
            f"{source} was not written by torch.save ({type(error).__name__})",
            "give a file of torch.save(model.state_dict(), …), or a .safetensors file",
        ) from error
    for name in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors: dict[str, Tensor] = {}
    if isinstance(content, Mapping) and all(isinstance(name, str) for name in content):
        tensors = {name: item for name, item in content.items() if isinstance(item, Tensor)}
    require(bool(tensors), _FIELD, f"{source} holds no named tensors", "save model.state_dict()")
    return tensors


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str, *, whole: bool = False) -> str:
    """Copy the weights whose name and shape match a tensor of ``model``; return a summary for the log.

    A head for other classes stays random. Raises :class:`UserError` if nothing matches, or, if ``whole``, if any of the
    model's tensors is missing.
    """
    available = {_WRAPPERS.sub("", name): tensor for name, tensor in weights.items()}
    state = model.state_dict()
    matching = {}
    for name, tensor in state.items():
        candidate = available.get(_WRAPPERS.sub("", name))
        if candidate is not None and candidate.shape == tensor.shape:
            matching[name] = candidate

    names = ", ".join(list(available)[:_SHOWN])
    require(
        any(name in matching for name, _ in model.named_parameters()),
        _FIELD,
        f"no tensor of {source} ({names}, …) has the name and shape of one of the model's parameters",
        "choose the model that the weights were saved from",
    )
    model.load_state_dict(matching, strict=False)
    missing = [name for name in state if name not in matching]
    require(
        not (whole and missing),
        "eval_only",
        f"{source} lacks {len(missing)} of the model's {len(state)} tensors: {_join_names(missing)}",
        "choose the model and data that the weights were trained for",
    )
    summary = f"initial weights: {len(matching)} of {len(state)} tensors from {source}"
    return f"{summary}; random: {_join_names(missing)}" if missing else summary


def _join_names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _read_file(source: str) -> Any:
    if Path(source).suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(source)
        except SafetensorError as error:
            raise RuntimeError(error) from error
    return torch.load(source, map_location="cpu", weights_only=True)


def _read_torchvision(source: str) -> dict[str, Tensor]:
    import_torchvision()
    from torchvision import models

    try:
        weights = models.get_weight(source)
    except (AttributeError, KeyError, ValueError) as error:
        raise UserError(_FIELD, f"torchvision has no {source}", "see torchvision.models.list_models()") from error
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise UserError(
            _FIELD,
            f"{source} is not in {folder}, and its download failed: {error}",
            f"copy {weights.url} into that folder",
        ) from error
