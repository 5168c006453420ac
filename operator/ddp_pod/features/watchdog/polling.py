"""The loop in which a rank polls: what ends it is what the rank waits for."""

import ast
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from .remedies import MISSING_FILE_REMEDY, POLL_REMEDY, REMAINING_FILE_REMEDY, RETRY_REMEDY
from .stacks import StackFrame

_MOST_BYTES: Final = 1 << 20  # of a script
_HEADER_LIMIT: Final = 80  # characters
_PATH_LIMIT: Final = 120
_CHECKS: Final = ("exists", "is_file", "is_dir", "isfile", "isdir")


class Polling(NamedTuple):
    """A loop in which a rank sleeps, and what could end it."""

    note: str
    remedy: str


def explain_polling(
    frame: StackFrame, paths: Mapping[str, str], pid: int, *, in_library: bool = False
) -> Polling | None:
    """Return the loop around a line that sleeps; None: there is none. ``paths``: of the line's variables by name.

    ``in_library``: other loops of a library than those for the end of a file are its own matter.
    """
    loop = _find_loop(frame)
    if loop is None:
        return None
    if isinstance(loop.test, ast.Constant):  # perhaps that of the training
        tried = "" if in_library else _find_retried(loop, frame.line)
        return Polling(f"it tries {tried[:_HEADER_LIMIT]!r} again and again", RETRY_REMEDY) if tried else None
    lock = _find_awaited_end(loop.test, paths)
    if lock and (in_library or all(map(_is_plain_call, loop.body))):  # a loop that does work awaits no end
        return Polling(f"it waits until {lock[:_PATH_LIMIT]} is removed", REMAINING_FILE_REMEDY)
    if in_library:
        return None
    header = f"while {ast.unparse(loop.test)}"
    missing = [path for path in _list_files(loop.test, paths) if not _exists(pid, path)]
    if missing and not lock:
        return Polling(f"it waits for {missing[0][:_PATH_LIMIT]}, which does not exist", MISSING_FILE_REMEDY)
    return Polling(f"it sleeps in {header[:_HEADER_LIMIT]!r}", POLL_REMEDY)


def _find_loop(frame: StackFrame) -> ast.While | None:
    """Return the innermost ``while`` of the script around a line."""
    try:
        with open(frame.path, encoding="utf-8") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read(_MOST_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and node.lineno <= frame.line <= (node.end_lineno or node.lineno)
    ]
    return max(loops, key=lambda loop: loop.lineno, default=None)


def _find_retried(loop: ast.While, line: int) -> str:
    """Return what an endless loop tries again after an exception, where it sleeps at a line; empty: nothing."""
    for node in loop.body:
        if not isinstance(node, ast.Try) or not node.handlers:
            continue
        sleeps = any(handler.lineno <= line <= (handler.end_lineno or 0) for handler in node.handlers)
        is_left = any(isinstance(part, (ast.Return, ast.Break)) for item in node.body for part in ast.walk(item))
        if (sleeps or line > (node.end_lineno or line)) and (is_left or node.orelse):
            return ast.unparse(node.body[0])
    return ""


def _is_plain_call(statement: ast.stmt) -> bool:
    """Return whether a statement only sleeps or prints, as far as its names tell."""
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return is_call and re.search(r"\b(sleep|print|log\w*)\b", ast.unparse(statement)) is not None


def _find_awaited_end(test: ast.expr, paths: Mapping[str, str]) -> str:
    """Return the file that a loop waits to be removed, or the expression of its path; empty: it waits for no such."""
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.func.attr in _CHECKS):
        return ""
    if test.args and ast.unparse(test.func.value) != "os.path":
        return ""  # of another object: a store
    return next(_list_files(test, paths), "") or ast.unparse(test.args[0] if test.args else test.func.value)


def _list_files(test: ast.expr, paths: Mapping[str, str]) -> Iterator[str]:
    """Yield the files whose existence an expression checks, as ``path.exists()`` or ``os.path.exists(path)``."""
    for node in ast.walk(test):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHECKS):
            continue
        if node.args and ast.unparse(node.func.value) != "os.path":
            continue  # of another object: a store
        operand = node.args[0] if node.args else node.func.value
        if isinstance(operand, ast.Constant) and isinstance(operand.value, str):
            yield operand.value
        elif isinstance(operand, ast.Name) and operand.id in paths:
            yield paths[operand.id]


def _exists(pid: int, path: str) -> bool:
    """Return whether a path exists for a process; True if that is unknown."""
    try:
        os.stat(os.path.join(f"/proc/{pid}/cwd", path))
    except FileNotFoundError:
        return not os.path.isdir(f"/proc/{pid}/cwd/.")
    except (OSError, ValueError):
        return True
    return True
