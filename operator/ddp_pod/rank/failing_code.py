"""The code that raised an exception: the expression, what a check requires, and the values of the names in both.

No code of the script runs: values are read from frames, by type.
"""

import ast
import linecache
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, NamedTuple

from ..base.exceptions import LIBRARY, THREAD, FailingCode
from ..base.files import is_own_file
from .advice import find_advice, find_changed, is_alone
from .calls import find_assigned
from .collation import describe_batch
from .library_calls import read_documentation
from .near_names import find_names
from .sources import find_sources
from .statements import (
    find_expression,
    find_path,
    find_position,
    find_root,
    get_position,
    list_operands,
    parse,
)
from .values import MISSING, Values, is_native_function, is_plain_call, is_tensor_value, read_operand
from .ways import Root, list_ways

_MOST_BYTES: Final = 1 << 19  # of a source file, whose tree takes hundred times as much
_MOST_VALUES: Final = 6
_LOADED: Final = time.time()  # in a rank before its script starts; helpers are forked, or later
_CODE_LIMIT: Final = 120  # characters
_VALUES_LIMIT: Final = 300
_PLAIN_TYPES: Final = (type(None), bool, int, float, str, list, tuple, dict)
_NONE_TYPE: Final = "NoneType"
_NONE: Final = f"'{_NONE_TYPE}' object"
_OPPOSITES: Final = {
    ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Is: ast.IsNot, ast.In: ast.NotIn,
    ast.NotEq: ast.Eq, ast.GtE: ast.Lt, ast.LtE: ast.Gt, ast.IsNot: ast.Is, ast.NotIn: ast.In,
}  # fmt: skip


class _Part(NamedTuple):
    """The part of a frame's code that runs: the statement, in it the expression, and what a check requires.

    Of a check of the script that is what it refuses. ``is_refusal``: Python code raises here, rather than an operation;
    ``is_helper``: in a function that does nothing else, so that its caller has checked.
    """

    frame: FrameType
    statement: ast.stmt
    expression: ast.AST
    required: ast.expr | None = None
    is_refusal: bool = False
    is_helper: bool = False


def find_failing_code(error: BaseException, since: float = _LOADED) -> FailingCode:
    """Return what the frames of an exception show. ``since``: when the rank started.

    Raises: anything that a source file or a value may cause.
    """
    traces = list(_list_traces(error.__traceback__))
    batch = describe_batch(traces)
    if batch:
        return FailingCode(values=_shorten(batch, _VALUES_LIMIT))
    own_trace = _find_own(traces)
    sources = _find_sources(traces, since)
    is_silent = isinstance(error, SystemExit) and (type(error.code) is not str or own_trace is not traces[-1])
    if not traces or is_silent or isinstance(error, SyntaxError):  # which names the line itself
        return FailingCode(sources=sources)
    own = _find_part(error, own_trace) if own_trace is not None else None  # a helper may have no line of the script
    last = own if own_trace is traces[-1] else _find_part(error, traces[-1])
    if last is not None and last.is_helper and own_trace not in (None, traces[-2]):
        last = _find_part(error, traces[-2]) or last
    required = None if last is None or own_trace is None else last.required or _find_missing_value(error, last)
    absent = None if own is None or own.is_refusal or required is not None else _find_absent_argument(error, own, last)
    code = "" if own is None or own.is_refusal else _unparse(own.expression)

    values = Values()
    ways = {} if own is None or own is last else list_ways(_list_roots(own))
    if own is not None and absent is not None:
        values.add(own.frame, list_operands(absent))
        required = absent
    elif last is not None and required is not None:
        values.add(last.frame, list_operands(required), ways)
        is_clear = (
            values.are_known or isinstance(error, (AttributeError, TypeError)) or (own is last and last.is_refusal)
        )
        required = required if is_clear else None
    elif last is not None and last is not own and not last.is_refusal:
        values.add(last.frame, list_operands(last.expression), ways, tensors_only=True)
    if own is not None and code:
        values.add(own.frame, list_operands(own.expression))
    return FailingCode(
        code,
        "" if required is None else _unparse(required),
        _shorten(", ".join([*values.list_texts()[:_MOST_VALUES], *_find_origin(error, own, required)]), _VALUES_LIMIT),
        values.find_difference(str(error) if isinstance(error, (RuntimeError, TypeError, ValueError)) else ""),
        *(find_names(error, last.frame, last.expression) if last is not None else ("", "")),
        _find_device(error, last) if last is not None else "",
        _find_variant(traces[-1]) if own_trace is not traces[-1] else "",
        _find_documentation(traces, own_trace),
        _find_advice(error, traces, own, last, ways),
        sources,
    )


def _find_own(traces: list[TracebackType]) -> TracebackType | None:
    """Return the innermost frame of the script, of those with a source if there are any: dataclasses generate code."""
    own = [trace for trace in traces if not _is_library(trace)]
    written = [trace for trace in own if linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)]
    return next(reversed(written or own), None)


def _find_documentation(traces: list[TracebackType], own: TracebackType | None) -> str:
    """Return the documentation of the library's function that raised, if the script has called it, so that it fits."""
    is_direct = own is None or own is traces[-2:][0]
    return read_documentation(traces[-1].tb_frame.f_code) if is_direct else ""


def _find_sources(traces: list[TracebackType], since: float) -> str:
    threads = "" if is_alone() else THREAD
    with suppress(Exception):  # the rest is recorded without them
        return f"{find_sources(traces, since)} {threads}".strip()
    return threads


def _find_advice(
    error: BaseException,
    traces: list[TracebackType],
    own: _Part | None,
    last: _Part | None,
    ways: Mapping[int, str],
) -> str:
    line = None if own is None else (own.frame, own.statement, own.expression)
    with suppress(Exception):  # the rest is recorded without it
        tree = None if own is None else parse("".join(linecache.getlines(own.frame.f_code.co_filename)))
        return find_advice(error, traces, line, None if last is None else last.required, tree, ways)
    return ""


def _find_device(error: BaseException, last: _Part) -> str:
    """Return the device on which native code has raised, of torch for finite tensors or of Python for plain values.

    Empty: unknown, or other code has raised. ``last``: the innermost frame's.
    """
    if last.is_refusal:
        return ""
    values = Values()
    values.add(last.frame, list_operands(last.expression), tensors_only=True)
    if values.device:
        return values.device if _is_native(last) and not values.is_diverged else ""
    is_plain = type(error) is RuntimeError and is_plain_call(last.frame, last.expression)
    if "during iteration" in str(error):
        is_plain = is_plain and find_changed(last.frame, last.statement) is not None
    return "cpu" if is_plain and is_alone() else ""


def _find_origin(error: BaseException, own: _Part | None, required: ast.expr | None) -> list[str]:
    """Return by what a name of the script has become None, or a plain value without the attribute that was read."""
    name = required.left if isinstance(required, ast.Compare) and isinstance(required.ops[0], ast.IsNot) else None
    if own is not None and isinstance(error, AttributeError) and isinstance(own.expression, ast.Attribute):
        name = own.expression.value
    if own is None or not isinstance(name, ast.Name) or type(read_operand(own.frame, name)[1]) not in _PLAIN_TYPES:
        return []
    tree = parse("".join(linecache.getlines(own.frame.f_code.co_filename)))
    value = find_assigned(own.frame, name, tree, own.statement.lineno)
    return [f"by `{_unparse(value)}` in line {value.lineno}"] if isinstance(value, ast.Call) else []


def _find_variant(trace: TracebackType) -> str:
    """Return the function beside the one that raised whose name adds what it takes, as ``…_with_logits``."""
    frame = trace.tb_frame
    beginning = f"{frame.f_code.co_name}_with_"
    names = [name for name, value in frame.f_globals.items() if name.startswith(beginning) and callable(value)]
    return names[0] if len(names) == 1 else ""


def _list_roots(own: _Part) -> list[Root]:
    """Return the values of the script's own line that have a name there."""
    known = (read_operand(own.frame, operand) for operand in islice(list_operands(own.expression), _MOST_VALUES))
    return [Root(ast.unparse(node), value) for node, value in known if value is not MISSING]


def _list_traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        if not is_own_file(trace.tb_frame.f_code.co_filename):
            yield trace
        trace = trace.tb_next


def _is_library(trace: TracebackType) -> bool:
    return bool(LIBRARY.search(trace.tb_frame.f_code.co_filename))


def _unparse(node: ast.AST) -> str:
    return _shorten(ast.unparse(node), _CODE_LIMIT)


def _shorten(text: str, limit: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}…"


def _find_part(error: BaseException, trace: TracebackType) -> _Part | None:
    """Return the part of a frame's code that a traceback points to; None if its source is not known."""
    frame = trace.tb_frame
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    if not lines or sum(map(len, lines)) > _MOST_BYTES:
        return None
    position = find_position(frame.f_code, trace.tb_lasti)
    path = find_path(parse("".join(lines)), trace.tb_lineno, position[2] if position else None)
    statement, expression = find_expression(path, position)
    if statement is None:
        return None
    unpacked = _find_unpacked(statement, position) if isinstance(error, ValueError) else None
    if unpacked is not None:
        return _Part(frame, statement, expression or statement, unpacked)
    if isinstance(statement, ast.Assert) and isinstance(error, AssertionError):
        check = statement.test if _is_library(trace) else _negate(statement.test)
        return _Part(frame, statement, statement.test, check, is_refusal=True)
    is_exit = isinstance(error, SystemExit) and isinstance(statement, ast.Expr)
    if is_exit or (isinstance(statement, ast.Raise) and expression is None):
        is_passed = isinstance(statement, ast.Raise) and _passes_on(statement, error, frame)
        required = None if is_passed else _find_requirement(path, frame.f_code)
        return _Part(frame, statement, statement, required, is_refusal=True, is_helper=_always_raises(path[-2]))
    if trace.tb_next is not None and isinstance(statement, ast.Expr) and _is_library(trace):  # it calls a helper
        return _Part(frame, statement, statement, _find_requirement(path, frame.f_code), is_refusal=True)
    return _Part(frame, statement, expression or statement)


def _find_unpacked(statement: ast.stmt, position: tuple[int | None, ...]) -> ast.expr | None:
    """Return how many values the right side of an assignment must have, if its names are at the position."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)) and get_position(target) == position:
            is_open = any(isinstance(name, ast.Starred) for name in target.elts)
            operator: ast.cmpop = ast.GtE() if is_open else ast.Eq()
            length = ast.Call(ast.Name("len", ast.Load()), [statement.value], [])  # type: ignore[attr-defined]
            return ast.Compare(length, [operator], [ast.Constant(len(target.elts) - is_open)])
    return None


def _passes_on(statement: ast.Raise, error: BaseException, frame: FrameType) -> bool:
    """Return whether a statement raises an exception that an object keeps, as the result of other work."""
    kept = statement.exc
    if not isinstance(kept, (ast.Attribute, ast.Subscript)):
        return False
    part, value = read_operand(frame, kept)
    return value is error or part is not kept  # many remove it from the object while they raise it


def _find_requirement(path: list[ast.AST], code: CodeType) -> ast.expr | None:
    """Return the condition that raises, of the script, or its opposite, of a library; None: it is not known.

    A library's condition of what the function itself has computed would not tell a caller what to change.
    """
    guard = path[-2]
    if not isinstance(guard, ast.If):
        return None
    is_met = path[-1] in guard.body
    if not LIBRARY.search(code.co_filename):
        return guard.test if is_met else _negate(guard.test)
    if any(isinstance(node, ast.Attribute) and node.attr.startswith("_") for node in ast.walk(guard.test)):
        return None  # the library's own state
    names = {node.id for node in ast.walk(guard.test) if isinstance(node, ast.Name)}
    computed = set(code.co_varnames[code.co_argcount + code.co_kwonlyargcount :])
    required = _negate(guard.test) if is_met else guard.test
    return required if names - computed else None


def _always_raises(node: ast.AST) -> bool:
    """Return whether a block is a function that does nothing but raise."""
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    return is_function and not any(isinstance(part, ast.Return) for part in ast.walk(node))


def _negate(node: ast.expr) -> ast.expr:
    """Return the opposite of a condition, without `not` where that is possible."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BoolOp):
        operator: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return ast.BoolOp(operator, [_negate(value) for value in node.values])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [_OPPOSITES[type(node.ops[0])]()], node.comparators)
    return ast.UnaryOp(ast.Not(), node)


def _find_missing_value(error: BaseException, part: _Part) -> ast.expr | None:
    """Return that a value must not be None or 0, or how long one must be, if an error is about that."""
    if isinstance(error, ZeroDivisionError):
        return _find_divisor(part)
    return _find_missing_item(part) if type(error) is IndexError else _find_value_that_is_none(error, part)


def _find_divisor(part: _Part) -> ast.expr | None:
    """Return that the divisor must not be 0, if it is, or is the length of something empty."""
    divisor = getattr(part.expression, "right", None)
    if not isinstance(divisor, ast.expr) or isinstance(divisor, ast.Constant):
        return None
    measured = divisor.args[0] if _is_length(divisor) else divisor  # type: ignore[attr-defined]
    known, value = read_operand(part.frame, measured)
    kinds = (int, float, complex) if measured is divisor else (list, tuple, dict, set, str)
    is_zero = known is measured and type(value) in kinds and not value
    return ast.Compare(divisor, [ast.NotEq()], [ast.Constant(0)]) if is_zero else None


def _is_length(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and bool(node.args)


def _find_missing_item(part: _Part) -> ast.expr | None:
    """Return how long a list or a tuple must be for the item that is read or set."""
    node = part.expression
    if not isinstance(node, ast.Subscript):
        return None
    known, owner = read_operand(part.frame, node.value)
    number = read_operand(part.frame, node.slice)[1]
    if known is not node.value or type(owner) not in (list, tuple) or type(number) is not int or number < 0:
        return None
    length = ast.Call(ast.Name("len", ast.Load()), [node.value], [])
    return ast.Compare(length, [ast.Gt()], [node.slice])


def _find_value_that_is_none(error: BaseException, part: _Part) -> ast.expr | None:
    """Return that a value must not be None, if an error is about one that is None."""
    if not isinstance(error, (AttributeError, TypeError)) or _NONE not in str(error):
        return None
    node = part.expression
    inner = getattr(node, "value", None) or getattr(node, "func", None)
    value = inner if isinstance(inner, ast.expr) else node
    is_iterated = isinstance(part.statement, (ast.For, ast.Assign)) and not isinstance(
        node, (ast.Attribute, ast.Subscript)
    )
    value = node if is_iterated else value
    if not isinstance(value, ast.expr) or isinstance(value, ast.Constant):
        return None
    known, content = read_operand(part.frame, value)
    if known is value and content is not None and not isinstance(value, ast.Call):
        return None
    return ast.Compare(value, [ast.IsNot()], [ast.Constant(None)])


def _find_absent_argument(error: BaseException, own: _Part, last: _Part | None) -> ast.expr | None:
    """Return that the only argument of the script's own line that is None must not be, if an error is about None.

    A message names it, or no other argument may have a None in it.
    """
    message = str(error)
    call = own.expression
    if not isinstance(error, TypeError) or _NONE_TYPE not in message or not isinstance(call, ast.Call):
        return None
    names = {f"(position {number})": node for number, node in enumerate(call.args, 1)}
    is_own = last is own and not any(isinstance(node, ast.Starred) for node in call.args)
    names |= {f"'{keyword.arg}'": keyword.value for keyword in call.keywords}
    values = {name: read_operand(own.frame, node) for name, node in names.items()}
    absent = [name for name, (part, value) in values.items() if part is names[name] and value is None]
    absent = [name for name in absent if not isinstance(names[name], ast.Constant)]
    is_certain = all(part is names[name] and _has_no_parts(value) for name, (part, value) in values.items())
    if len(absent) != 1 or not (is_certain or (is_own and absent[0] in message)):
        return None
    return ast.Compare(names[absent[0]], [ast.IsNot()], [ast.Constant(None)])


def _has_no_parts(value: Any) -> bool:
    return type(value) in (type(None), bool, int, float, str) or is_tensor_value(value)


def _is_native(part: _Part) -> bool:
    """Return whether the code is an operator, a method of a tensor, or a function of torch that is not Python."""
    node = part.expression
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, value = read_operand(part.frame, node.func.value)
        if owner is node.func.value and value is not MISSING:
            return is_tensor_value(value) or is_native_function(value, node.func.attr)
        node = find_root(node.func)
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript))
