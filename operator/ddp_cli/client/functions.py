"""Run a function as a job's program: its module's folder is packed, and each rank imports and calls it."""

import ast
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ddp_cli.client.errors import ClientError

# The program of a rank. The image may lack this package, so it uses the standard library only.
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
    """A function in a module: ``root`` is the folder from which it is imported, ``file`` its source file."""

    module: str
    name: str
    file: Path
    root: Path

    def build_command(self, args: Mapping[str, Any], workdir: Path) -> list[str]:
        """Return the command that calls it in the copy of ``workdir``. Raises: ClientError, if it is elsewhere."""
        try:
            path = self.root.resolve().relative_to(workdir.resolve())
        except ValueError:
            raise ClientError(
                f"{self.module}.{self.name} is in {self.file}, outside of workdir {workdir}, the only folder that pods "
                f"receive; leave workdir out, or choose one that contains {self.root}"
            ) from None
        call = {"module": self.module, "function": self.name, "path": path.as_posix(), "args": args}
        return ["python3", "-c", ENTRY, json.dumps(call).replace("$(", "$$(")]  # keep Kubernetes from expanding $(…)


def find_function(function: Callable[..., object]) -> Function:
    """Return where a function is defined. Raises: ClientError, if pods could not import it."""
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function):
        raise ClientError(f"{function!r} is not a function of a module; pass a function that calls it")
    if "<" in name:
        kind = "a lambda" if name.endswith("<lambda>") else "inside another function"
        raise ClientError(f"{name} is {kind}, so pods cannot import it; define it at the top level of a module")
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        if function.__module__ != "__main__":
            raise ClientError(f"{function.__module__}.{name} has no source file; define it in a module that has one")
        raise ClientError(
            f"{name} is defined in this notebook or shell, but pods need a file. Start its cell with "
            f"`%%writefile training.py`, include its imports, run the cell, then `from training import {name}`"
        )
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        raise ClientError(f"{function.__module__}.{name} is in an installed package; write a module that calls it")
    return _locate(module, name, Path(file))


def _locate(module: ModuleType, name: str, file: Path) -> Function:
    spec = module.__spec__
    dotted = module.__name__
    if dotted == "__main__":
        dotted = spec.name if spec else file.stem
    levels = dotted.count(".") + (file.stem == "__init__")
    return Function(dotted, name, file, file.absolute().parents[levels])


def check_arguments(function: Function, args: Mapping[str, Any]) -> None:
    """Check that a function accepts the arguments, and that they are plain data.

    The source file counts, because pods import it: the module in memory may be older. Raises: TypeError; ClientError,
    if the file cannot be parsed.
    """
    for name, value in args.items():
        _check_plain(value, f"args[{name!r}]")
    try:
        tree: ast.AST = ast.parse(function.file.read_bytes())
    except (SyntaxError, OSError) as error:
        raise ClientError(f"{function.file}: {error}") from None
    node = tree
    for part in function.name.split("."):
        node = next((child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part), node)
    if isinstance(node, ast.FunctionDef) and node.name == function.name and not node.decorator_list:
        try:
            _signature(node.args).bind(**args)
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
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string; JSON needs string keys")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"{where}: a {type(value).__name__} is not plain data (strings, numbers, True, False, None, lists and "
            "dicts of them); pass plain data, and create the object in the function"
        )
