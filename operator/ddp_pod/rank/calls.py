"""What the script should call, or pass, instead of what its line names: a method for its result, a module for its
parameters, a value that has taken a function's name."""

import ast
import re
from collections.abc import Iterator
from inspect import CO_COROUTINE
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

from .near_names import find_called
from .script_objects import find_function, find_member, find_module_name, is_instance, is_module, list_names
from .values import MISSING, read_operand

_LENGTH: Final = 60  # characters of a name
# Messages of Python and torch, about the type of a value.
_CALLABLE: Final = re.compile(r"\b(builtin_function_or_method|method|function)\b")
_COUNTED: Final = re.compile(r"([\w.<>]+)\(\) takes .* but \d+ (?:was|were) given")
_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers")
_MISSING: Final = re.compile(r"([\w.<>]+)\(\) missing \d+ required [\w-]+ arguments?: ('.+')")
_FUNCTIONS: Final = (
    FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, ClassMethodDescriptorType,
)  # fmt: skip


def shorten_code(node: ast.AST) -> str:
    """Return the text of code, without the end of a long one."""
    text = ast.unparse(node)
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"


def find_assigned(frame: FrameType, name: ast.Name, tree: ast.Module, line: int) -> ast.expr | None:
    """Return what the statement assigns from which a name has its value at a line of a frame; None: it is not certain.

    That is the last one before in the same block, or the only one; or one that calls the name itself, if the other one
    creates an object of another class: after it, the name is no function any more.
    """
    code = frame.f_code
    is_local = name.id in (*code.co_varnames, *code.co_cellvars)
    scope = find_scope(tree, code)
    if scope is None or name.id in code.co_freevars:
        return None
    nodes = list(ast.walk(scope if is_local else tree))
    if any(_binds(node, name.id) for node in nodes):
        return None
    before = _find_before(scope, name.id, line)
    if before is not None:
        return before
    values = list(filter(None, (_find_value(node, name.id) for node in nodes)))
    if sum(_sets(node, name.id) for node in nodes) != len(values):
        return None
    calling = [value for value in values if _calls(value, name)]
    if len(values) == 2 and len(calling) == 1:
        former = next(value for value in values if value is not calling[0])
        kind: Any = read_operand(frame, former.func)[1] if isinstance(former, ast.Call) else None
        is_other = is_instance(kind, type) and not is_instance(read_operand(frame, name)[1], kind)
        return calling[0] if is_other else None
    return values[0] if len(values) == 1 else None


def find_scope(tree: ast.Module, code: CodeType) -> ast.AST | None:
    """Return the function or the module to which code belongs; None: neither."""
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min(part.lineno for part in (node, *node.decorator_list))
            if first == code.co_firstlineno:
                return node
    return None


def _binds(node: ast.AST, name: str) -> bool:
    """Return whether code gives a name a value otherwise than by an assignment, or takes it away."""
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0]) in (name, "*")
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return name in node.names
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Del)
    return name in (getattr(node, part, None) for part in ("arg", "name", "rest")) and not isinstance(node, ast.keyword)


def _find_before(scope: ast.AST, name: str, line: int) -> ast.expr | None:
    """Return what the last statement of a line's block assigns to a name before that line; None: it is not certain."""
    for node in ast.walk(scope):
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
        part, value = read_operand(frame, statement.iter)
        return f"iterate over range({shorten_code(part)})" if part is statement.iter and type(value) is int else ""
    if "'float' object cannot be interpreted as an integer" in message:
        return "convert the number to an integer: int(…), or // instead of /"
    for node in _list_used(expression):
        if isinstance(node, ast.Call):
            function = _find_function(frame, node.func) if "'coroutine'" in message else None
            function = function.__func__ if type(function) is MethodType else function
            if type(function) is FunctionType and function.__code__.co_flags & CO_COROUTINE:
                return f"await {shorten_code(node.func)}()"
        elif _CALLABLE.search(message) and _find_function(frame, node) is not None:
            return f"{shorten_code(node)} is a function: call it, {shorten_code(node)}()"
    return ""


def _list_used(expression: ast.AST) -> Iterator[ast.AST]:
    """Yield the operands of an expression itself, without the arguments of its calls."""
    yield expression
    for node in ast.walk(expression):
        if isinstance(node, ast.BinOp):
            yield from (node.left, node.right)
        elif isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.UnaryOp):
            yield node.operand
        elif isinstance(node, (ast.Subscript, ast.FormattedValue)):
            yield node.value


def _find_function(frame: FrameType, node: ast.AST) -> Any:
    """Return the function or method that code names; None: it names another value, or is unknown."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    part, value = read_operand(frame, node)
    if part is not node and isinstance(node, ast.Attribute) and part is node.value and value is not MISSING:
        value = find_member(type(value), node.attr)
    return value if type(value) in _FUNCTIONS else None


def advise_on_called(message: str, frame: FrameType, expression: ast.AST, tree: ast.Module) -> str:
    """Return the value of a name that is called like a function."""
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
    is_shadowed = assigned is not None and not isinstance(assigned, ast.Constant)
    return (
        ""
        if assigned is None or not is_shadowed
        else f"{name} is a {kind} since line {assigned.lineno}: give that another name"
    )


def advise_on_parameters(message: str, frame: FrameType, expression: ast.AST) -> str:
    """Return what to pass instead of a module, to what works on its parameters."""
    if not isinstance(expression, ast.Call):
        return ""
    function = read_operand(frame, expression.func)[1]
    module = function.__module__ if type(function) is FunctionType else ""
    module = find_module_name(function) if is_instance(function, type) else module
    for node in expression.args if f"{module}.".startswith(("torch.optim.", "torch.nn.utils.")) else ():
        part, value = read_operand(frame, node)
        if part is node and is_module(value) and f"'{list_names(type(value))[0]}' object is not iterable" in message:
            return f"pass {shorten_code(node)}.parameters()"
    return ""


def advise_on_missing(message: str, frame: FrameType, expression: ast.AST) -> str:
    """Return which arguments a call lacks."""
    missing = _MISSING.match(message)
    if missing is None or not isinstance(expression, ast.Call):
        return ""
    part, value = read_operand(frame, expression.func)
    is_forward = part is expression.func and is_module(value)
    called = find_function(type(value), "forward") if is_forward else find_called(frame, expression.func)
    is_known = called is not None and called.__qualname__ == missing[1]
    return f"pass {missing[2].replace(chr(39), '')}" if is_known else ""


def advise_on_count(message: str, frame: FrameType, expression: ast.AST) -> str:
    """Return the parameters of a method that got too many arguments, of an object that the script's line names."""
    counted = _COUNTED.match(message)
    for node in ast.walk(expression) if counted is not None else ():
        part, value = read_operand(frame, node) if isinstance(node, (ast.Name, ast.Attribute)) else (None, MISSING)
        if counted is None or part is not node:
            continue
        function = find_function(type(value), counted[1].rpartition(".")[2])
        if function is None or function.__qualname__ != counted[1]:
            continue
        code = function.__code__
        first, *others = code.co_varnames[: code.co_argcount] or ("",)
        title = counted[1].rpartition("<locals>.")[2]
        place = f"(line {code.co_firstlineno})"
        if not first:
            return f"add self as the first parameter of {title} {place}"
        if first != "self":
            return f"{first}, the first parameter of {title} {place}, is the object itself"
        return f"{title}() takes {', '.join(others) or 'nothing'} {place}"
    return ""
