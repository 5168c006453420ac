"""Modules of the trainer that the launcher brings to images without it: ``ddp_trainer.memory`` and ``.exporter``."""

import os
import zipfile

from .files import ARCHIVE

_PACKAGE = "ddp_trainer/"


def add_delivered_packages(runtime: str) -> None:
    """Extract the delivered package, and let all later Python processes find it. Raises: OSError.

    Its parent folder has no ``__init__.py``, so a complete ``ddp_trainer`` of the image takes precedence.
    """
    folder = os.path.join(runtime, "python")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_PACKAGE)])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder)))
