"""Packages of the trainer that the launcher brings to images without it: ``ddp_trainer.memory``."""

import os
import shutil

_PACKAGE = "ddp_trainer."
_FOLDER = os.path.dirname(os.path.abspath(__file__))


def add_delivered_packages(runtime: str) -> None:
    """Lay out the delivered modules as a package, and let all later Python processes find it. Raises: OSError.

    The folder of the package has no ``__init__.py``, so a complete ``ddp_trainer`` of the image takes precedence.
    """
    root = os.path.join(runtime, "python")
    keys = [name for name in os.listdir(_FOLDER) if name.startswith(_PACKAGE)]
    for key in keys:
        *folders, module = key[: -len(".py")].split(".")
        folder = os.path.join(root, *folders)
        os.makedirs(folder, exist_ok=True)
        shutil.copyfile(os.path.join(_FOLDER, key), os.path.join(folder, f"{module}.py"))
    if keys:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
