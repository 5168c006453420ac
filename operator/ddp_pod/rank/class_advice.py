"""What to do about exceptions of Python's library and of torch, by what their class documents and their frames hold."""

import ast
import re
import struct
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, time
from inspect import CO_GENERATOR
from types import FrameType, FunctionType, TracebackType
from typing import Any, Final

from ..base.exceptions import LIBRARY
from .calls import shorten_code
from .script_objects import (
    find_function,
    find_member,
    find_module_name,
    is_instance,
    is_module,
    list_names,
    read_attributes,
)
from .values import MISSING, read_operand

_MOST_TEXT: Final = 60  # characters of a value
_BASE64: Final = 4  # characters that belong together (RFC 4648)
_CONTEXT: Final = "context manager protocol"
_STREAMS: Final = ("TextIOWrapper", "BufferedReader", "BufferedWriter", "FileIO")

Own = tuple[FrameType, ast.stmt, ast.AST]
"""The frame, the statement and the expression of the script's innermost line."""


def advise_on_class(error: BaseException, traces: Sequence[TracebackType], own: Own | None) -> str:
    """Return what to do; empty: the class of the exception, or its frames, do not show it."""
    last = traces[-1].tb_frame
    kind = type(error)
    by_class = _BY_CLASS.get((find_module_name(kind), list_names(kind)[0]))
    text = by_class(error, last) if by_class is not None else ""
    if text or own is None:
        return text
    by_call = _BY_CALL.get((find_module_name(kind), list_names(kind)[0]))
    return by_call(error, own) if by_call is not None else ""


def _advise_on_pattern(error: Any, _: FrameType) -> str:
    """Return the place of a mistake in a regular expression."""
    position = error.pos
    if type(error.pattern) is not str or type(position) is not int:
        return ""
    part = error.pattern[position : position + _MOST_TEXT]
    shown = f", `{part}`" if part else ""
    return f"correct the regular expression at position {position}{shown}; re.escape() is for text that is no pattern"


def _advise_on_distribution(error: Any, _: FrameType) -> str:
    name = error.args[0] if error.args else None
    known = type(name) is str and len(name) <= _MOST_TEXT
    return f"install the distribution {name} (a package's may have another name), or correct the name" if known else ""


def _advise_on_same_file(*_: Any) -> str:
    return "copy to another path, or not at all where source and target are the same"


def _advise_on_checkpoint(_: BaseException, last: FrameType) -> str:
    """Return which function has computed otherwise when torch.utils.checkpoint called it again."""
    recompute = read_attributes(last.f_locals.get("self")).get("recompute_fn")
    function = _find_cell(recompute, "fn")
    if is_module(function):
        function = find_function(type(function), "forward")
    function = getattr(function, "__func__", function)
    name = "the function that it calls"
    if type(function) is FunctionType and not LIBRARY.search(function.__code__.co_filename):
        name = f"{function.__qualname__.rpartition('<locals>.')[2]} (line {function.__code__.co_firstlineno})"
    return (
        f"checkpoint() calls {name} again in backward(), where it must save the same tensors: let it depend on nothing "
        "that has changed since (a counter, a cache, train() or eval()); checkpoint(…, debug=True) shows both passes"
    )


def _find_cell(function: Any, name: str) -> Any:
    """Return the value of a variable that a function has from around it; None: unknown."""
    if type(function) is not FunctionType or name not in function.__code__.co_freevars:
        return None
    cells = function.__closure__ or ()
    return cells[function.__code__.co_freevars.index(name)].cell_contents


def _advise_on_value(error: BaseException, last: FrameType) -> str:
    module = last.f_globals.get("__name__")
    if module == "torch.amp.grad_scaler" and last.f_locals.get("allow_fp16") is False:
        return "keep the parameters in float32, and let torch.autocast compute in float16, as GradScaler expects"
    if module == "torch.distributions.distribution":
        return _advise_on_constraint(last)
    format_text = last.f_locals.get("format") if module == "_strptime" else None
    is_refused = type(format_text) is str and "does not match format" in str(error)
    return f"change the format, {format_text!r}, to that of the text, or the text" if is_refused else ""


def _advise_on_constraint(last: FrameType) -> str:
    """Return how to make a parameter of a distribution fit it."""
    name, constraint = last.f_locals.get("param"), last.f_locals.get("constraint")
    if type(name) is not str or constraint is None:
        return ""
    kind = list_names(type(constraint))[0].lstrip("_")
    is_positive = (kind, read_attributes(constraint).get("lower_bound")) == ("GreaterThan", 0)
    how = "exp() and softplus() make it positive" if is_positive else "see torch.distributions.transform_to()"
    return f"let {name} satisfy the constraint: {how}"


def _advise_on_operator(_: BaseException, last: FrameType) -> str:
    """Return how to compute with sharded tensors what has no rule for their shards."""
    if not str(last.f_globals.get("__name__")).startswith("torch.distributed.tensor."):
        return ""
    return "compute it on to_local() or full_tensor() of the sharded tensors, or register a sharding strategy for it"


def _advise_on_start_method(_: BaseException, last: FrameType) -> str:
    """Return how to choose how processes start, where that is decided already."""
    is_refused = last.f_globals.get("__name__") == "multiprocessing.context"
    return "call set_start_method() once, or use get_context(…) where another way is needed" if is_refused else ""


def _advise_on_graph_change(error: BaseException, last: FrameType) -> str:
    """Return what to do where DistributedDataParallel was told that the graph never changes."""
    is_changed = last.f_globals.get("__name__") == "torch.autograd.graph" and "static_graph" in str(error)
    return "leave static_graph=True out: the parameters that steps use differ" if is_changed else ""


def _advise_on_torch(error: BaseException, last: FrameType) -> str:
    advice = (_advise_on_start_method, _advise_on_graph_change, _advise_on_derivative)
    return next(filter(None, (function(error, last) for function in advice)), "")


def _advise_on_derivative(error: BaseException, last: FrameType) -> str:
    """Return what to do about an operation of a first backward() that a second one cannot differentiate."""
    message = str(error)
    is_second = message.startswith("derivative for aten::") and "_backward" in message.partition(" is not ")[0]
    if not is_second or last.f_globals.get("__name__") != "torch.autograd.graph":
        return ""
    is_attention = "scaled_dot_product" in message
    kernel = "sdpa_kernel(SDPBackend.MATH)" if is_attention else "another implementation"
    return f"compute the gradient without create_graph=True, or by operations that have a second derivative ({kernel})"


_BY_CLASS: Final[dict[tuple[str, str], Callable[[Any, FrameType], str]]] = {
    ("re", "error"): _advise_on_pattern,
    ("re", "PatternError"): _advise_on_pattern,
    ("importlib.metadata", "PackageNotFoundError"): _advise_on_distribution,
    ("shutil", "SameFileError"): _advise_on_same_file,
    ("torch.utils.checkpoint", "CheckpointError"): _advise_on_checkpoint,
    ("builtins", "ValueError"): _advise_on_value,
    ("builtins", "NotImplementedError"): _advise_on_operator,
    ("builtins", "RuntimeError"): _advise_on_torch,
}


def _advise_on_bytes(error: BaseException, own: Own) -> str:
    """Return how many bytes struct.unpack needs."""
    frame, _, expression = own
    if not isinstance(expression, ast.Call) or "requires a buffer of" not in str(error):
        return ""
    function = read_operand(frame, expression.func)[1]
    text: Any = read_operand(frame, expression.args[0])[1] if expression.args else MISSING
    if function is not struct.unpack or type(text) not in (str, bytes):
        return ""
    return f"pass exactly {struct.calcsize(text)} bytes, as {text!r} takes"


def _advise_on_base64(error: BaseException, own: Own) -> str:
    """Return by how many characters a text of base64 differs from a whole one."""
    frame, _, expression = own
    for node in expression.args[:1] if isinstance(expression, ast.Call) else ():
        part, value = read_operand(frame, node)
        is_text = part is node and type(value) in (str, bytes) and "padding" in str(error)
        if is_text and len(value) % _BASE64:
            return f"the {len(value)} characters are no multiple of {_BASE64}: they are cut, or lack = at the end"
    return ""


def _advise_on_csv(error: BaseException, _: Own) -> str:
    csv = sys.modules.get("_csv")
    is_limit = csv is not None and f"({csv.field_size_limit()})" in str(error)
    text = "increase csv.field_size_limit(), unless a quote that nothing closes makes the field that long"
    return text if is_limit else ""


def _advise_on_stream(_: BaseException, own: Own) -> str:
    """Return in which mode a file is open that cannot be read, or not be written."""
    frame, __, expression = own
    function = expression.func if isinstance(expression, ast.Call) else None
    if not isinstance(function, ast.Attribute):
        return ""
    node = function.value
    part, stream = read_operand(frame, node)
    if part is not node or list_names(type(stream))[0] not in _STREAMS or find_module_name(type(stream)) != "_io":
        return ""
    return f"{shorten_code(node)} is open in mode {stream.mode!r}: open it in one that allows this"


def _advise_on_context(error: BaseException, own: Own) -> str:
    """Return what an object lacks for a with statement."""
    frame, statement, expression = own
    is_context = _CONTEXT in str(error) or str(error) in ("__enter__", "__exit__", "__aenter__", "__aexit__")
    if not isinstance(statement, (ast.With, ast.AsyncWith)) or not is_context or not isinstance(expression, ast.Call):
        return ""
    kind = read_operand(frame, expression.func)[1]
    code = shorten_code(expression.func)
    if type(kind) is FunctionType and kind.__code__.co_flags & CO_GENERATOR:
        return f"decorate {code} with @contextlib.contextmanager"
    if not is_instance(kind, type) or find_member(kind, "__enter__") is not None:
        return ""
    if "async" in str(error) or isinstance(statement, ast.AsyncWith):
        return ""
    file = getattr(sys.modules.get(find_module_name(kind)), "__file__", None)
    is_own = type(file) is str and not LIBRARY.search(file)
    lacking = f"define __enter__() and __exit__() in {code}, or " if is_own else ""
    return f"{lacking}use {code} without with: it is no context manager"


def _advise_on_type(error: BaseException, own: Own) -> str:
    return _advise_on_context(error, own) or _advise_on_times(error, own)


def _advise_on_times(_: BaseException, own: Own) -> str:
    """Return which of two times has no zone, where the other one has one."""
    frame, _statement, expression = own
    nodes = [node for node in ast.walk(expression) if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))]
    read = [(node, *read_operand(frame, node)) for node in nodes]
    times = [(node, value) for node, part, value in read if part is node and type(value) in (datetime, time)]
    naive = [node for node, value in times if value.tzinfo is None]
    is_mixed = len(naive) < len(times) and bool(naive)
    return (
        f"{shorten_code(naive[0])} has no time zone: .replace(tzinfo=…) gives it that of the other" if is_mixed else ""
    )


def _advise_on_number(error: BaseException, own: Own) -> str:
    """Return which text is no number."""
    frame, _, expression = own
    if not isinstance(expression, ast.Call) or ast.unparse(expression.func) not in ("int", "float"):
        return ""
    for node in expression.args[:1]:
        part, value = read_operand(frame, node)
        if part is not node or type(value) is not str or repr(value[:_MOST_TEXT])[:-1] not in str(error):
            continue
        hint = " (it has a decimal comma)" if re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value) else ""
        hint = " (it is empty)" if not value.strip() else hint
        return f"{value[:_MOST_TEXT]!r} is no number{hint}: correct the data, or convert or skip such a value before"
    return ""


_BY_CALL: Final[dict[tuple[str, str], Callable[[BaseException, Own], str]]] = {
    ("struct", "error"): _advise_on_bytes,
    ("binascii", "Error"): _advise_on_base64,
    ("_csv", "Error"): _advise_on_csv,
    ("io", "UnsupportedOperation"): _advise_on_stream,
    ("builtins", "TypeError"): _advise_on_type,
    ("builtins", "ValueError"): _advise_on_number,
    ("builtins", "AttributeError"): _advise_on_context,
}
