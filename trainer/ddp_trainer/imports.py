"""Import users' functions by name, and torchvision next to a CPU build of torch.

torchvision's Linux wheels are linked against CUDA. With a CPU build of torch their compiled operators don't load, and
the import fails because ``torchvision::nms`` has no schema to attach a shape function to. Two declarations suffice for
everything that the trainer uses (models, transforms, readers of uncompressed data). The operators themselves are
missing and raise when called. A torchvision whose operators load is not changed.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from ddp_sdk.errors import UserError, require

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# A library's definitions are removed with the object, so it must live as long as the process.
_library: Any = None


def check_name(name: str, known: Collection[str], field: str) -> None:
    """Raise :class:`UserError` if ``name`` is neither one of ``known`` nor ``module:function``."""
    remedy = f"choose one of {', '.join(known)}, or module:function"
    require(name in known or ":" in name, field, f"{name!r} is not known", remedy)


def load_callable(name: str, field: str) -> Callable[..., Any]:
    """Import ``module:function``; the working directory is searched too, as by ``python script.py``.

    Raises :class:`UserError` of ``field`` if the module or the function does not exist. Exceptions of the user's module
    are not caught.
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
            f"install it, or add its folder to PYTHONPATH (also searched: {os.getcwd()})",
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(field, f"{module_name!r} has no function {attribute!r}", "check the spelling")
    checked: Callable[..., Any] = function
    return checked


def import_torchvision() -> None:
    """Make ``import torchvision`` work: declare the two operators if the compiled ones don't load.

    Raises :class:`UserError` if torchvision is not installed.
    """
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise UserError("torchvision", "is not installed", "pip install torchvision")
    if _library is not None or _operators_load(Path(spec.origin).parent):
        return
    import torch

    _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        _library.define(schema)


def _operators_load(folder: Path) -> bool:
    """Return whether torchvision's compiled operators load; loading them again is harmless."""
    import torch

    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
