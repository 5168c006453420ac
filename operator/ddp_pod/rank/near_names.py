"""The names that exist where one was not found: keys, attributes, variables, and arguments."""

import ast
import builtins
import difflib
import re
import sys
from collections.abc import Iterable
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

from ..base.exceptions import LIBRARY
from .script_objects import (
    WRAPPING,
    find_function,
    find_member,
    find_module_name,
    is_instance,
    is_module,
    list_bases,
    list_children,
    list_names,
    list_own_members,
)
from .values import MISSING, list_attributes, read_operand

_MOST: Final = 6
_MOST_COMPARED: Final = 2000  # names: a vocabulary has a million, and a comparison takes microseconds
_LENGTH: Final = 40  # characters of a name
_NEAR: Final = 0.7  # of difflib's ratio
_ARGUMENT: Final = re.compile(r"(?:unexpected keyword|missing \d+ required \S+) arguments?:? '([^']+)'")
_MARK: Final = "\ufeff"
_PLAIN_KEYS: Final = (str, int, float, bool, bytes, type(None))
_NOT_IMPORTED: Final = re.compile(r"cannot import name '([^']+)'")


class Names(NamedTuple):
    """Which names exist, and where: empty: unknown. ``package``: with its version, another of which may have others."""

    text: str = ""
    package: str = ""


def find_names(error: BaseException, frame: FrameType, code: ast.AST) -> Names:
    """Return which names exist instead of one that was not found. ``frame``, ``code``: the innermost ones."""
    if type(error) is KeyError:
        return Names(_find_keys(error, frame, code))
    if isinstance(error, NameError):
        return Names(_find_variables(error, frame))
    if isinstance(error, AttributeError):
        return _find_attributes(getattr(error, "obj", MISSING), getattr(error, "name", None))
    if isinstance(error, ImportError):
        if isinstance(code, ast.ImportFrom) and code.level and not frame.f_globals.get("__package__"):
            return Names(_explain_relative_import(code))
        missing = _NOT_IMPORTED.match(str(error))
        return _find_attributes(sys.modules.get(error.name or ""), missing[1]) if missing else Names()
    if isinstance(error, TypeError):
        return _find_parameters(error, frame, code)
    return Names()


def _find_package(module: Any) -> str:
    """Return the package of a module, with its version; empty: it has none."""
    name = module.partition(".")[0] if type(module) is str else ""
    package = sys.modules.get(name)
    version = vars(package).get("__version__") if type(package) is ModuleType else None
    return f"{name} {version}" if is_instance(version, str) else ""


def list_near(name: str, names: Iterable[Any]) -> list[str]:
    """Return the few names that are most like another one, the nearest first."""
    compared = islice(names, _MOST_COMPARED)
    texts = {text: None for text in compared if type(text) is str and len(text) <= _LENGTH}
    return difflib.get_close_matches(name, texts, _MOST // 2, _NEAR)


def _find_keys(error: KeyError, frame: FrameType, code: ast.AST) -> str:
    key = error.args[0] if error.args else None
    for node in ast.walk(code) if type(key) in _PLAIN_KEYS else ():
        if not isinstance(node, ast.Subscript):
            continue
        part, table = read_operand(frame, node.value)
        is_table = part is node.value and is_instance(table, dict) and dict.__len__(table) > 0
        if is_table and not dict.__contains__(table, key):
            text = f"{ast.unparse(node.value)[:_LENGTH]} has {_list_keys(str(key), table)}"
            kinds = {list_names(type(known))[0] for known in islice(dict.keys(table), _MOST_COMPARED)}
            own = list_names(type(key))[0]
            return f"{text}, keys of type {kinds.pop()}, not {own}" if len(kinds) == 1 and own not in kinds else text
    return ""


def _explain_relative_import(code: ast.ImportFrom) -> str:
    """Return what to do about a relative import in a file that runs as a program, and so in no package."""
    module = code.module or ", ".join(alias.name for alias in code.names)
    return f"import {module} without the dot, or start the file within its package (python -m): it runs as a program"


def _list_keys(key: str, table: dict[Any, Any]) -> str:
    """Return the keys of a table, those that are near another key first."""
    keys = islice(dict.keys(table), _MOST_COMPARED)
    names = [str(name) for name in keys if type(name) in (str, int) and len(str(name)) <= _LENGTH]
    names = list(dict.fromkeys([*list_near(key, names), *names]))[:_MOST]
    count = dict.__len__(table)
    more = f" and {count - len(names)} more" if names and count > len(names) else ""
    mark = " (a byte order mark: read the file as utf-8-sig)" if any(_MARK in name for name in names) else ""
    return f"{', '.join(map(_show, names)) or f'{count} other keys'}{more}{mark}"


def _show(name: str) -> str:
    """Return a name, with escapes for characters that nobody sees."""
    return name if name.isprintable() else ascii(name)


def _find_variables(error: NameError, frame: FrameType) -> str:
    name = getattr(error, "name", None)
    if type(name) is not str:
        return ""
    if name in getattr(sys, "stdlib_module_names", ()):
        return f"import {name}"
    near = list_near(name, [*frame.f_locals, *frame.f_globals, *vars(builtins)])
    return f"there is {', '.join(near)}" if near else ""


def _find_attributes(owner: Any, name: Any) -> Names:
    if owner is MISSING or owner is None or type(name) is not str:
        return Names()
    kind = type(owner)
    inner = _find_wrapped(owner, name)
    if inner:
        return Names(f"{list_names(kind)[0]} has {inner}")
    if name in WRAPPING and is_module(owner):
        return Names(f"{list_names(kind)[0]} is not wrapped (omit .{name})")
    near = list_near(name, [*list_attributes(owner), *list_attributes(kind)])
    package = _find_package(owner.__name__ if kind is ModuleType else find_module_name(kind))
    title = owner.__name__ if kind is ModuleType else list_names(kind)[0]
    if near:
        return Names(f"{title} has {', '.join(near)}", package)
    sibling = _find_sibling(kind, name)
    if sibling:
        return Names(f"{title} has no {name}, as {sibling} has")
    return Names(f"{title} has no {name}", package) if package else Names()


def _find_sibling(kind: type, name: str) -> str:
    """Return the only class with the same base class that defines a name; empty: none or several do."""
    base = next(iter(list_bases(kind)[1:]), object)
    if base is object or find_module_name(base) == "builtins":
        return ""
    subclasses: list[type] = type.__subclasses__(base)
    found = [list_names(other)[0] for other in subclasses[:_MOST_COMPARED] if name in list_own_members(other)]
    return found[0] if len(found) == 1 else ""


def _find_wrapped(owner: Any, name: str) -> str:
    """Return the way to an attribute of the module around which others are wrapped; empty: it has none."""
    path = ""
    for _ in range(_MOST):
        children = list_children(owner)
        if len(children) != 1:
            return ""
        child, owner = children[0]
        path += f".{child}"
        if name in list_attributes(owner) or find_member(type(owner), name) is not None:
            return f"{path}.{name}"
    return ""


def _find_parameters(error: TypeError, frame: FrameType, code: ast.AST) -> Names:
    message = str(error)
    argument = _ARGUMENT.search(message)
    if "missing" in message and LIBRARY.search(frame.f_code.co_filename):
        return Names()  # the script has named none
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call)] if argument else []
    for node in calls:
        function = find_called(frame, node.func)
        if function is not None and argument is not None and message.startswith(f"{function.__qualname__}() "):
            called = function.__code__
            count = called.co_argcount + called.co_kwonlyargcount
            names = [name for name in called.co_varnames[:count] if name != "self"]
            near = list_near(argument[1], set(names) - {argument[1]})
            text = f"{ast.unparse(node.func)[-_LENGTH:]}() takes {', '.join(near or names[: 2 * _MOST]) or 'nothing'}"
            return Names(text, _find_package(function.__module__))
    return Names()


def find_called(frame: FrameType, node: ast.expr) -> FunctionType | None:
    """Return the function that a call runs; None if it is not one of Python, or unknown."""
    part, value = read_operand(frame, node)
    if isinstance(node, ast.Attribute) and part is node.value:
        value = find_function(type(value), node.attr)
    elif part is not node:
        return None
    function = find_function(value, "__init__") if is_instance(value, type) else value
    return function if type(function) is FunctionType else None
