"""What the script should call, or pass, instead of what its line names: a method for its result, a module for its
parameters, a value that has taken a function's name."""

import ast
import re
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

from .script_objects import find_function, find_member, is_module, list_names
from .values import MISSING, read_operand

_LENGTH: Final = 60  # characters of a name
# Messages of Python and torch, about the type of a value.
_CALLABLE: Final = re.compile(r"\b(builtin_function_or_method|method|function)\b")
_ITERATED: Final = re.compile(r"object is not iterable|should be an iterable")
_COUNTED: Final = re.compile(r"(?:[\w.]*<locals>\.)?((?:\w+\.)*)(\w+)\(\) takes .* but \d+ (?:was|were) given")
_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers")
_MISSING: Final = re.compile(r"\(\) missing \d+ required [\w-]+ arguments?: ('.+')")
_FUNCTIONS: Final = (
    FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, ClassMethodDescriptorType,
)  # fmt: skip


def shorten_code(node: ast.AST) -> str:
    """Return the text of code, without the end of a long one."""
    text = ast.unparse(node)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def find_assigned(frame: FrameType, name: ast.Name, tree: ast.Module, line: int) -> ast.expr | None:
    """Return what the statement assigns from which a name has its value at a line of a frame; None: it is not certain.

    That is the last one before in the same block, or the only one. One that calls the name itself counts alone: after
    it, the name is no function any more.
    """
    before = _find_before(tree, name.id, line)
    if before is not None:
        return before
    code = frame.f_code
    is_local = name.id in code.co_varnames
    scopes = (node for node in ast.walk(tree) if getattr(node, "lineno", 0) == code.co_firstlineno) if is_local else ()
    scope = next(iter(scopes), tree)
    values = [_find_value(node, name.id) for node in ast.walk(scope)]
    calling = [value for value in values if _calls(value, name)]
    if len(calling) == 1:
        return calling[0]
    is_only = sum(_sets(node, name.id) for node in ast.walk(scope)) == 1
    return next(filter(None, values), None) if is_only else None


def _find_before(tree: ast.Module, name: str, line: int) -> ast.expr | None:
    """Return what the last statement of a line's block assigns to a name before that line; None: it is not certain."""
    for node in ast.walk(tree):
        for block in (getattr(node, part, None) for part in _BLOCKS):
            statements = block if isinstance(block, list) else []
            places = [part for part, item in enumerate(statements) if item.lineno <= line <= item.end_lineno]
            if places and not _has_blocks(statements[places[0]]):
                former = statements[: places[0]]
                changes = [item for item in former if any(_sets(part, name) for part in ast.walk(item))]
                return _find_value(changes[-1], name) if changes else None
    return None


def _has_blocks(statement: ast.stmt) -> bool:
    return any(isinstance(getattr(statement, part, None), list) for part in (*_BLOCKS, "cases"))


def _sets(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name


def _find_value(node: ast.AST, name: str) -> ast.expr | None:
    """Return what a statement assigns to a name alone; None: it is no such statement."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    is_assignment = isinstance(node, (ast.Assign, ast.AnnAssign)) and len(targets) == 1
    return node.value if is_assignment and targets[0] is not None and _sets(targets[0], name) else None  # type: ignore[attr-defined]


def _calls(value: ast.expr | None, name: ast.Name) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == name.id


def advise_on_result(message: str, frame: FrameType, statement: ast.stmt, expression: ast.AST) -> str:
    """Return what to call or to await, where a TypeError is about a function, a coroutine or a number of items."""
    if isinstance(statement, ast.For) and "'int' object is not iterable" in message:
        return f"iterate over range({shorten_code(statement.iter)})"
    if "'float' object cannot be interpreted as an integer" in message:
        return "convert the number to an integer: int(…), or // instead of /"
    called = {id(node.func) for node in ast.walk(expression) if isinstance(node, ast.Call)}
    for node in ast.walk(expression):
        is_called = id(node) in called
        is_named = "'coroutine'" in message if is_called else bool(_CALLABLE.search(message))
        function = _find_function(frame, node) if is_named else None
        if is_called and type(function) in (FunctionType, MethodType):
            return f"await {shorten_code(node)}()"
        if function is not None and not is_called:
            return f"{shorten_code(node)} is a function: call it, {shorten_code(node)}()"
    return ""


def _find_function(frame: FrameType, node: ast.AST) -> Any:
    """Return the function or method that code names; None: it names another value, or is unknown."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    part, value = read_operand(frame, node)
    if part is not node and isinstance(node, ast.Attribute) and part is node.value and value is not MISSING:
        value = find_member(type(value), node.attr)
    return value if type(value) in _FUNCTIONS else None


def advise_on_called(message: str, frame: FrameType, expression: ast.AST, tree: ast.Module) -> str:
    """Return what a name stands for that is called like a function."""
    if "object is not callable" not in message or not isinstance(expression, ast.Call):
        return ""
    function = expression.func
    part, value = read_operand(frame, function)
    if part is not function or value is MISSING:
        return ""
    name = shorten_code(function)
    if type(value) is ModuleType:
        own = value.__name__.rpartition(".")[2]
        return f"{name} is a module: call {name}.{own}()" if callable(vars(value).get(own)) else ""
    line = expression.lineno
    assigned = find_assigned(frame, function, tree, line) if isinstance(function, ast.Name) else None
    kind = list_names(type(value))[0]
    return "" if assigned is None else f"{name} is a {kind} since line {assigned.lineno}: give that another name"


def advise_on_parameters(message: str, frame: FrameType, expression: ast.AST) -> str:
    """Return what to pass instead of a module, to what works on its parameters."""
    arguments = expression.args if isinstance(expression, ast.Call) and _ITERATED.search(message) else []
    for node in arguments:
        part, value = read_operand(frame, node)
        if part is node and is_module(value):
            return f"pass {shorten_code(node)}.parameters()"
    return ""


def advise_on_missing(message: str, expression: ast.AST) -> str:
    """Return which arguments a call lacks."""
    missing = _MISSING.search(message) if isinstance(expression, ast.Call) else None
    return "" if missing is None else f"pass {missing[1].replace(chr(39), '')}"


def advise_on_count(message: str, frame: FrameType, expression: ast.AST) -> str:
    """Return the parameters of a method that got too many arguments, of an object that the script's line names."""
    counted = _COUNTED.match(message)
    for node in ast.walk(expression) if counted is not None else ():
        part, value = read_operand(frame, node) if isinstance(node, (ast.Name, ast.Attribute)) else (None, MISSING)
        function = None if part is not node or counted is None else find_function(type(value), counted[2])
        if counted is None or function is None or not function.__qualname__.endswith(f"{counted[1]}{counted[2]}"):
            continue
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        title = f"{counted[1]}{counted[2]}"
        if "self" not in names:
            return f"add self as the first parameter of {title} (line {code.co_firstlineno})"
        return f"{title}() takes {', '.join(names[1:]) or 'nothing'} (line {code.co_firstlineno})"
    return ""
