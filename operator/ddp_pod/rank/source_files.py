"""Whether code reads a file or folder that the next attempt may find otherwise: by paths in the values of its call."""

import ast
import os
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Final

from .lasting_files import is_lasting_file
from .script_objects import is_instance

_LISTING: Final = {"listdir", "scandir", "walk", "glob", "iglob", "rglob", "iterdir"}
_WRITING: Final = {"w", "wb", "a", "ab", "x", "xb"}  # modes of open()
_WILD: Final = "*?["
_MOST_TEXT: Final = 4096  # of a path, PATH_MAX
_JOINS: Final = {"join", "joinpath", "Path", "PurePath", "str", "fspath", "abspath", "expanduser", "format"}
_VARIABLES: Final = {"getenv", "get"}  # of os, and of os.environ

Read = Callable[[ast.expr], tuple[ast.expr, Any]]
"""As ``values.read_operand``."""


def is_changing(call: ast.Call, read: Read, since: float) -> bool:
    """Return whether a call takes the path of a file, or lists a folder, that has changed or that others may change.

    ``since``: when the rank started.
    """
    owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    paths = [find_path(node, read) for node in (*call.args[:3], *(item.value for item in call.keywords[:3]), *owner)]
    name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
    if name in _LISTING:
        listed = next(filter(None, paths), "" if call.args or owner else ".")
        folder = _cut_pattern(listed)
        return bool(listed) and not is_lasting_file(folder, since)
    if any(isinstance(node, ast.Constant) and node.value in _WRITING for node in call.args[1:2]):
        return False
    return any(path and os.path.isfile(path) and not is_lasting_file(path, since) for path in paths)


def _cut_pattern(path: str) -> str:
    """Return the folder above the first wildcard of a path."""
    while any(sign in path for sign in _WILD):
        path = os.path.dirname(path)
    return path or "."


def find_path(node: ast.expr, read: Read) -> str:
    """Return the text or path that code makes of known values; empty: unknown, or too long."""
    part, value = (node, node.value) if isinstance(node, ast.Constant) else read(node)
    if part is node and (type(value) is str or is_instance(value, PurePath)):
        return str(value) if len(str(value)) <= _MOST_TEXT and "\0" not in str(value) else ""
    parts: list[ast.expr] = []
    separator = ""
    if isinstance(node, ast.JoinedStr):
        parts = [item.value if isinstance(item, ast.FormattedValue) else item for item in node.values]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Add)):
        parts = [node.left, node.right]
        separator = "/" if isinstance(node.op, ast.Div) else ""
    elif isinstance(node, ast.Subscript) and _is_environment(node.value):
        return os.environ.get(find_path(node.slice, read), "")
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if name in _VARIABLES and owner is not None and (name == "getenv" or _is_environment(owner)) and node.args:
            return os.environ.get(find_path(node.args[0], read), "")
        parts = list(node.args) if name in _JOINS else []
        if name == "joinpath" and owner is not None:
            parts.insert(0, owner)
        separator = "/"
    texts = [find_path(part, read) for part in parts]
    return separator.join(texts)[:_MOST_TEXT] if texts and all(texts) else ""


def _is_environment(node: ast.expr) -> bool:
    return (getattr(node, "attr", None) or getattr(node, "id", "")) == "environ"
