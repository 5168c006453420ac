"""Importing what is not ours: users' own models and datasets by name, and torchvision beside a torch without CUDA.

torchvision's Linux wheels are linked against CUDA. Beside a CPU build of torch their compiled operators don't load, and
then the import fails because ``torchvision::nms`` has no schema to attach a shape function to. Two declarations are
enough for everything the trainer uses (models, transforms, readers of uncompressed data); the operators themselves
stay missing and say so when called. A torchvision whose operators do load is left alone.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ddp_trainer.errors import UserError, require

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# A library's definitions vanish with the object, so it lives as long as the process.
_library: Any = None


def check_name(name: str, known: Collection[str], field: str) -> None:
    """Raise :class:`UserError` for a name that is neither one of ``known`` nor ``module:function``."""
    remedy = f"choose one of {', '.join(known)}, or module:function"
    require(name in known or ":" in name, field, f"{name!r} is not known", remedy)


def load_callable(name: str, field: str) -> Callable[..., Any]:
    """The function named ``module:function``; the working directory is searched like ``python script.py`` does.

    Raises :class:`UserError` naming ``field`` where the module or the function is not found. An exception inside the
    user's module is his own and passes through.
    """
    module_name, _, attribute = name.partition(":")
    require(
        bool(module_name and attribute), field, f"{name!r} is not module:function", "give for example my_models:build"
    )
    if not module_name.startswith("ddp_trainer.") and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            field,
            f"module {error.name!r} of {name!r} is not found",
            f"install it, or add its folder to PYTHONPATH (searched also: {os.getcwd()})",
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(field, f"{module_name!r} has no function {attribute!r}", "check the spelling")
    found: Callable[..., Any] = function
    return found


def import_torchvision() -> None:
    """Make ``import torchvision`` work, declaring the two operators where the compiled ones don't load.

    Raises :class:`UserError` where torchvision is not installed.
    """
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise UserError("torchvision", "is not installed", "pip install 'ddp-operator[trainer]'")
    if _library is not None or _operators_load(Path(spec.origin).parent):
        return
    import torch

    _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        _library.define(schema)


def _operators_load(folder: Path) -> bool:
    """Whether torchvision's compiled operators load; loading them twice does no harm."""
    import torch

    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
