"""``module:function`` names: how built-in and users' own models and datasets are found."""

import importlib
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

from ddp_trainer.errors import UserError, require


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
