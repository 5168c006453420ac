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
_FUNCTIONS: Final = (
    FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, ClassMethodDescriptorType,
)  # fmt: skip


def shorten_code(node: ast.AST) -> str:
    """Return the text of code, without the end of a long one."""
    text = ast.unparse(node)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def find_assigned(frame: FrameType, name: ast.Name, tree: ast.Module) -> ast.expr | None:
    """Return what the only statement assigns that gives a name its value in a frame; None: there are more, or none.

    One that calls the name itself counts alone: after it, the name is no function any more.
    """
    code = frame.f_code
    is_local = name.id in code.co_varnames
    scopes = (node for node in ast.walk(tree) if getattr(node, "lineno", 0) == code.co_firstlineno) if is_local else ()
    nodes = (node for node in ast.walk(next(iter(scopes), tree)) if name.id in _list_assigned(node))
    values = [getattr(node, "value", None) for node in nodes]
    values = [value for value in values if _calls(value, name)] or values
    return values[0] if len(values) == 1 and isinstance(values[0], ast.expr) else None


def _calls(value: ast.AST | None, name: ast.Name) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == name.id


def _list_assigned(node: ast.AST) -> list[str]:
    """Return the names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = (part for target in targets if target is not None for part in ast.walk(target))
    return [part.id for part in names if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]


def advise_on_result(message: str, frame: FrameType, statement: ast.stmt, expression: ast.AST) -> str:
    """Return what to call or to await, where a TypeError is about a function, a coroutine or a number of items."""
    if isinstance(statement, ast.For) and "'int' object is not iterable" in message:
        return f"iterate over range({shorten_code(statement.iter)})"
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
    assigned = find_assigned(frame, function, tree) if isinstance(function, ast.Name) else None
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
