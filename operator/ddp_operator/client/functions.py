"""A function as the program of a job: its module's folder travels, and each rank imports it and calls it."""

import ast
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ddp_operator.client.errors import ClientError

# What a rank runs, in any image with Python: nothing of this package is there.
ENTRY: Final = """\
import functools, importlib, json, os, sys
call = json.loads(sys.argv.pop(1))
sys.path.insert(0, os.path.abspath(call["path"]))
function = functools.reduce(getattr, call["function"].split("."), importlib.import_module(call["module"]))
function(**call["args"])
"""
_PLAIN: Final = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Function:
    """Where a function is found: in a module, whose names begin at ``root``, and whose text is in ``file``."""

    module: str
    name: str
    file: Path
    root: Path

    def build_command(self, args: Mapping[str, Any], workdir: Path) -> list[str]:
        """Return the command that calls it in ``workdir``'s copy. Raises: ClientError, where it is not in there."""
        try:
            path = self.root.resolve().relative_to(workdir.resolve())
        except ValueError:
            raise ClientError(
                f"{self.module}.{self.name} is in {self.file}, and not in workdir {workdir}, which is all that the "
                f"pods get; leave workdir out, or choose one with {self.root} in it"
            ) from None
        call = {"module": self.module, "function": self.name, "path": path.as_posix(), "args": args}
        return ["python3", "-c", ENTRY, json.dumps(call).replace("$(", "$$(")]  # which a pod would expand


def find_function(function: Callable[..., object]) -> Function:
    """Return where a function is. Raises: ClientError, where pods could not import it, with the remedy."""
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function):
        raise ClientError(f"{function!r} is not a function of a module; write one that calls it, with plain arguments")
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else "inside another function"
        raise ClientError(f"{name} is {kind}, which pods cannot import; define it at the top level of a module")
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        if function.__module__ != "__main__":
            raise ClientError(f"{function.__module__}.{name} has no source file; define it in a module that has one")
        raise ClientError(
            f"{name} is defined in this notebook or shell, and code travels as files. Begin its cell with "
            f"`%%writefile training.py`, with what it imports in it, run that, and then `from training import {name}`"
        )
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        raise ClientError(f"{function.__module__}.{name} is installed, not yours; write a module that calls it")
    return _locate(module, name, Path(file))


def _locate(module: ModuleType, name: str, file: Path) -> Function:
    spec = module.__spec__
    dotted = module.__name__ if module.__name__ != "__main__" else spec.name if spec else file.stem
    levels = dotted.count(".") + (file.stem == "__init__")
    return Function(dotted, name, file, file.absolute().parents[levels])


def check_arguments(function: Function, args: Mapping[str, Any]) -> None:
    """See that a function takes the arguments, and that they are plain data.

    What counts is its text in the file, as the pods will have it: the module may have been imported before a change.
    Raises: TypeError; ClientError, where the text is none.
    """
    for name, value in args.items():
        _check_plain(value, f"args[{name!r}]")
    try:
        tree: ast.AST = ast.parse(function.file.read_bytes())
    except (SyntaxError, OSError) as error:
        raise ClientError(f"{function.file}: {error}") from None
    found = tree
    for part in function.name.split("."):
        found = next((node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == part), found)
    if isinstance(found, ast.FunctionDef) and found.name == function.name and not found.decorator_list:
        try:
            _signature(found.args).bind(**args)
        except TypeError as error:
            raise TypeError(f"{function.module}.{function.name}(): {error}; give them by name in args") from None


def _signature(args: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    usual = [*args.posonlyargs, *args.args]
    first = len(usual) - len(args.defaults)
    defaults = {arg.arg for arg in usual[first:]}
    defaults |= {arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default}
    groups: Sequence[tuple[Sequence[ast.arg], Any]] = (
        (args.posonlyargs, kinds.POSITIONAL_ONLY),
        (args.args, kinds.POSITIONAL_OR_KEYWORD),
        ([args.vararg] if args.vararg else [], kinds.VAR_POSITIONAL),
        (args.kwonlyargs, kinds.KEYWORD_ONLY),
        ([args.kwarg] if args.kwarg else [], kinds.VAR_KEYWORD),
    )
    return inspect.Signature(
        [
            inspect.Parameter(arg.arg, kind, default=None if arg.arg in defaults else kinds.empty)
            for group, kind in groups
            for arg in group
        ]
    )


def _check_plain(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: its key {key!r} is not text, as JSON needs it")
            _check_plain(one, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _check_plain(one, f"{where}[{number}]")
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"{where}: a {type(value).__name__} is not plain data (text, numbers, True, False, None, lists and dicts "
            "of them); pass what it is made from, and make it in the function"
        )
