"""Importing torchvision beside a torch without CUDA.

torchvision's Linux wheels are linked against CUDA. Beside a CPU build of torch their compiled operators don't load, and
then the import fails because ``torchvision::nms`` has no schema to attach a shape function to. Two declarations are
enough for everything the trainer uses (models, transforms, readers of uncompressed data); the operators themselves
stay missing and say so when called. A torchvision whose operators do load is left alone.
"""

import importlib.util
from pathlib import Path
from typing import Any

from ddp_trainer.errors import UserError

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# A library's definitions vanish with the object, so it lives as long as the process.
_library: Any = None


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
