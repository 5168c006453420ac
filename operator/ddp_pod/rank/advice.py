"""What the script should do instead, where the object that refused its use shows it.

An immutable object, a container that changes under a loop, a class without its methods, an object that was closed.
"""

import ast
import inspect
import io
import linecache
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError
from enum import Enum
from itertools import islice
from types import CodeType, FrameType, FunctionType, GeneratorType, MappingProxyType, ModuleType, TracebackType
from typing import Any, Final

from ..base.exceptions import LIBRARY
from ..base.files import is_own_file
from .calls import (
    advise_on_called,
    advise_on_count,
    advise_on_missing,
    advise_on_parameters,
    advise_on_result,
    find_scope,
    shorten_code,
)
from .class_advice import advise_on_class
from .near_names import list_near
from .script_objects import (
    find_member,
    find_module_name,
    is_instance,
    is_module,
    is_tensor,
    list_bases,
    list_names,
    list_own_members,
    read_attributes,
    read_tensor,
)
from .values import MISSING, is_of_python, read_operand

_MOST: Final = 8
_MOST_CLASSES: Final = 10_000
_BITS: Final = 63  # of the numbers of torch and NumPy, beside the sign
_CHANGEABLE: Final[dict[type, str]] = {
    tuple: "list",
    range: "list",
    bytes: "bytearray",
    str: "list",
    MappingProxyType: "dict",
}
_HASHABLE: Final[dict[type, str]] = {
    list: "a tuple",
    set: "a frozenset",
    dict: "a tuple of its items",
    bytearray: "bytes",
}
_JSON: Final = {
    "set": "list()", "frozenset": "list()", "PurePath": "str()", "date": ".isoformat()", "Tensor": ".tolist()",
    "ndarray": ".tolist()", "generic": ".item()", "Enum": ".value", "bytes": ".decode()", "Decimal": "float()",
}  # fmt: skip
_VIEWS: Final = ("items", "keys", "values")
_CHANGES: Final = (
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft",
    "remove", "setdefault", "update",
)  # fmt: skip
_AMBIGUOUS: Final = ("Boolean value of Tensor with more than one value", "The truth value of an array with more than")
_LEAVING: Final = (ast.Break, ast.Return, ast.Raise)
_LATER: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOOPS: Final = ("get_running_loop", "get_event_loop")
_FILES: Final = (io.FileIO, io.BytesIO, io.StringIO)
_LAYERS: Final = ((io.TextIOWrapper, "buffer"), *((kind, "raw") for kind in (
    io.BufferedReader, io.BufferedWriter, io.BufferedRandom
)))  # fmt: skip
_STATES: Final = ("_closed", "closed", "_shutdown")
_CLOSING: Final = ("close", "shutdown")


def find_advice(
    error: BaseException,
    traces: Sequence[TracebackType],
    own: tuple[FrameType, ast.stmt, ast.AST] | None,
    required: ast.expr | None,
    tree: ast.Module | None,
    ways: Mapping[int, str],
) -> str:
    """Return what to do, by the objects in the frames of an exception; empty: they do not show it.

    ``own``: the frame, the statement and the expression of the script's innermost line; ``required``: what the
    innermost frame requires; ``tree``: of the script's file; ``ways``: how its line reaches values, by their id.
    """
    last = traces[-1].tb_frame
    texts = [
        _advise_on_function(error),
        _advise_on_missing_method(error, last),
        _advise_on_enum(error, traces),
        _advise_on_graph(last, required),
        _advise_on_loop(error, last),
        _advise_on_json(last, ways),
        _advise_on_yield(error, last),
        _advise_on_module(error, last),
    ]
    if own is not None:
        frame, statement, expression = own
        texts += [
            _advise_on_immutable(error, own, last),
            _advise_on_abstract(error, frame, expression),
            _advise_on_fields(error, frame, expression),
            _advise_on_nothing(error, frame, expression),
            _advise_on_closed(error, own, last, tree),
        ]
        if str(error).startswith(_AMBIGUOUS):
            texts.append("reduce it to one value, by .any() or .all(), or compare with `is`")
        if frame is last:
            texts += [
                _advise_on_iteration(error, frame, statement),
                _advise_on_operands(error, frame, expression),
            ]
        if isinstance(error, TypeError):
            texts += _advise_on_calls(str(error), own, tree, is_innermost=frame is last)
    texts.append(advise_on_class(error, traces, own))
    return next(filter(None, texts), "")


def _advise_on_calls(
    message: str, own: tuple[FrameType, ast.stmt, ast.AST], tree: ast.Module | None, *, is_innermost: bool
) -> list[str]:
    frame, statement, expression = own
    texts = [
        advise_on_parameters(message, frame, expression),
        advise_on_missing(message, frame, expression),
        advise_on_count(message, frame, expression),
    ]
    if is_innermost:
        texts.append(advise_on_result(message, frame, statement, expression))
    if is_innermost and tree is not None:
        texts.append(advise_on_called(message, frame, expression, tree))
    return texts


def _advise_on_immutable(error: BaseException, own: tuple[FrameType, ast.stmt, ast.AST], last: FrameType) -> str:
    """Return how to change an object of which a statement has set an attribute or an item in vain."""
    frame, statement, expression = own
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    target = targets[0]
    if not isinstance(target, (ast.Attribute, ast.Subscript)) or len(targets) > 1:
        return ""
    part, owner = read_operand(frame, target.value)
    if part is not target.value or owner is MISSING:
        return ""
    name = shorten_code(part)
    if isinstance(target, ast.Subscript):
        is_refused = "does not support item assignment" in str(error) and expression is target
        is_known = is_refused and type(owner) in _CHANGEABLE and type(error) is TypeError
        return f"{name} cannot change: make it a {_CHANGEABLE[type(owner)]}" if is_known else ""
    if not isinstance(error, AttributeError) or expression is not statement:  # the right side has raised
        return ""
    if type(error) is FrozenInstanceError:
        is_frozen = getattr(find_member(type(owner), "__dataclass_params__"), "frozen", False) is True
        return f"{name} cannot change: build another, dataclasses.replace({name}, {target.attr}=…)" if is_frozen else ""
    return _advise_on_attribute(name, owner, target.attr, statement) if frame is last else ""


def _advise_on_attribute(name: str, owner: Any, attribute: str, statement: ast.stmt) -> str:
    """Return how to change an object whose attribute could not be set."""
    if is_instance(owner, tuple) and find_member(type(owner), "_fields") is not None:
        return f"{name} cannot change: build another, {name}._replace({attribute}=…)"
    member = find_member(type(owner), attribute)
    if type(member) is property and member.fset is None:
        return f"{name}.{attribute} is a property without a setter: add one, or change what it computes from"
    has_slots = find_member(type(owner), "__slots__") is not None and not any(
        "__dict__" in list_own_members(base) for base in list_bases(type(owner))
    )
    is_absent = has_slots and member is None and not isinstance(statement, ast.AugAssign)  # which reads it first
    return f"{list_names(type(owner))[0]} has no {attribute} in its __slots__: add it there" if is_absent else ""


def _advise_on_iteration(error: BaseException, frame: FrameType, statement: ast.stmt) -> str:
    """Return over what to iterate instead of a container that changes in the loop."""
    changed = find_changed(frame, statement) if type(error) is RuntimeError else None
    return "" if changed is None else f"iterate over a copy, list({shorten_code(changed)}), as the loop changes it"


def find_changed(frame: FrameType, statement: ast.stmt) -> ast.expr | None:
    """Return over what a loop iterates, if that is a container which its body changes; None: a thread may change it."""
    if not isinstance(statement, ast.For) or not is_alone():
        return None
    node = statement.iter
    is_view = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS
    iterated = node.func.value if is_view else node  # type: ignore[attr-defined]
    part, container = read_operand(frame, iterated)
    is_known = part is iterated and is_instance(container, dict, set, deque)
    return node if is_known and _has_change(statement, ast.unparse(iterated)) else None


def _has_change(loop: ast.For, name: str) -> bool:
    """Return whether the body of a loop adds or removes an item of a named container, and continues."""
    blocks = [value for node in ast.walk(loop) for _, value in ast.iter_fields(node) if isinstance(value, list)]
    other = [item for block in blocks if any(isinstance(item, _LEAVING) for item in block) for item in block]
    other += [node for node in ast.walk(loop) if isinstance(node, _LATER)]
    skipped = {id(part) for node in other for part in ast.walk(node)}
    nodes = [part for item in loop.body for part in ast.walk(item) if id(part) not in skipped]
    is_set = any(isinstance(getattr(node, "ctx", None), ast.Store) and ast.unparse(node) == name for node in nodes)
    keys = [ast.unparse(node) for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
    return not is_set and any(_changes(node, name, keys) for node in nodes)


def _changes(node: ast.AST, name: str, keys: Sequence[str]) -> bool:
    """Return whether code adds or removes an item of a named container. ``keys``: of items in it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _CHANGES and ast.unparse(node.func.value) == name
    if not isinstance(node, ast.Subscript) or isinstance(node.ctx, ast.Load) or ast.unparse(node.value) != name:
        return False
    return isinstance(node.ctx, ast.Del) or ast.unparse(node.slice) not in keys


def is_alone() -> bool:
    """Return whether no other thread runs code of the script."""
    own = threading.get_ident()
    others = (frame for thread, frame in sys._current_frames().items() if thread != own)
    return not any(_is_script(frame.f_code.co_filename) for other in others for frame in _walk_back(other))


def _walk_back(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_script(path: str) -> bool:
    return not (LIBRARY.search(path) or is_own_file(path) or path.startswith("<"))


def _advise_on_function(error: BaseException) -> str:
    """Return what the backward of a torch.autograd.Function of the script must return, if a message names it."""
    torch: Any = sys.modules.get("torch")
    message = str(error) if type(error) is RuntimeError and torch is not None else ""
    if "Backward" not in message:
        return ""
    for kind in islice(_list_subclasses(torch.autograd.Function), _MOST_CLASSES):
        name = list_names(kind)[0]
        functions = [find_member(kind, function) for function in ("forward", "backward")]
        if f"{name}Backward " not in f"{message} " or any(type(item) is not staticmethod for item in functions):
            continue
        forward, backward = (item.__func__.__code__ for item in functions)
        if not _is_script(backward.co_filename):
            continue
        names = forward.co_varnames[: forward.co_argcount]
        inputs = names if type(list_own_members(kind).get("setup_context")) is staticmethod else names[1:]
        place = f"line {backward.co_firstlineno}"
        return (
            f"{name}.backward ({place}) must return a gradient for each argument of forward ({', '.join(inputs)}): "
            "of its shape, or None"
        )
    return ""


def _list_subclasses(kind: type) -> Iterator[type]:
    waiting = [kind]
    while waiting:
        children: list[type] = type.__subclasses__(waiting.pop())
        yield from children
        waiting += children


def _advise_on_missing_method(error: BaseException, last: FrameType) -> str:
    """Return which method a class of the script must define, whose base class only raises."""
    code = last.f_code
    owner = last.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if not isinstance(error, NotImplementedError) or owner is None:
        return ""
    kind = type(owner)
    for base in list_bases(kind)[1:]:
        for name, member in list_own_members(base).items():
            if type(member) is FunctionType and member.__code__ is code and find_member(kind, name) is member:
                return _describe_missing([name], kind) if _only_raises(code) else ""
    return ""


def _only_raises(code: CodeType) -> bool:
    """Return whether a function has nothing but a docstring and a statement that raises."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        function: Any = ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))).body[0]
    except (IndexError, SyntaxError):
        return False
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _advise_on_abstract(error: BaseException, frame: FrameType, expression: ast.AST) -> str:
    """Return which abstract methods a class must define before there can be an object of it."""
    if not isinstance(error, TypeError) or not isinstance(expression, ast.Call):
        return ""
    part, kind = read_operand(frame, expression.func)
    abstract = list_own_members(kind).get("__abstractmethods__") if is_instance(kind, type) else None
    if part is not expression.func or type(abstract) is not frozenset or not abstract:
        return ""
    if not abstract.isdisjoint(list_own_members(kind)):
        return f"{list_names(kind)[0]} is abstract: build a subclass that defines {', '.join(sorted(abstract)[:_MOST])}"
    return _describe_missing(sorted(abstract), kind)


def _advise_on_fields(error: BaseException, frame: FrameType, expression: ast.AST) -> str:
    """Return the fields of a class of pydantic that refuses its values."""
    if not isinstance(error, ValueError) or not isinstance(expression, ast.Call):
        return ""
    part, kind = read_operand(frame, expression.func)
    fields: Any = list_own_members(kind).get("__pydantic_fields__") if is_instance(kind, type) else None
    is_known = part is expression.func and type(fields) is dict and fields
    return f"{list_names(kind)[0]} has {', '.join(islice(fields, _MOST))}" if is_known else ""


def _advise_on_nothing(error: BaseException, frame: FrameType, expression: ast.AST) -> str:
    """Return what gives no item at all to a new iterator."""
    node: Any = expression
    for name in ("next", "iter"):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != name or len(node.args) != 1:
            return ""
        node = node.args[0]
    if not isinstance(error, StopIteration):
        return ""
    part, value = read_operand(frame, node)
    if part is not node or value is MISSING or find_member(type(value), "__next__") is not None:  # it may be used up
        return ""
    attributes = read_attributes(value)
    size = attributes.get("batch_size") if attributes.get("drop_last") is True else None
    dropped = f": it has fewer than {size} samples (drop_last=True)" if type(size) is int else ""
    return f"{shorten_code(node)} gives no item{dropped}"


def _describe_missing(methods: Sequence[str], kind: type) -> str:
    own = [name for name, member in list_own_members(kind).items() if type(member) is FunctionType]
    near = [known for name in methods for known in list_near(name, own)]
    spelled = f", which has {', '.join(near)}" if near else ""
    return f"define {', '.join(methods[:_MOST])} in {list_names(kind)[0]}{spelled}"


def _advise_on_enum(error: BaseException, traces: Sequence[TracebackType]) -> str:
    """Return the values, or names, of an Enum that has not the one which was looked up."""
    for trace in traces if isinstance(error, (KeyError, ValueError)) else ():
        kind: Any = trace.tb_frame.f_locals.get("cls")
        if trace.tb_frame.f_globals.get("__name__") == "enum" and is_instance(kind, type) and issubclass(kind, Enum):
            members = list_own_members(kind)
            names = members.get("_member_names_", ())
            values = members.get("_value2member_map_", {}) if isinstance(error, ValueError) else names
            known = [repr(value) for value in islice(values, _MOST) if type(value) in (str, int)]
            return f"{list_names(kind)[0]} has {', '.join(known)}" if known else ""
    return ""


def _advise_on_graph(last: FrameType, required: ast.expr | None) -> str:
    """Return how to get a tensor that a library accepts only without the graph that has computed it."""
    for node in ast.walk(required) if required is not None else ():
        if isinstance(node, ast.Attribute) and node.attr == "is_leaf":
            part, value = read_operand(last, node.value)
            if part is node.value and value is not MISSING and is_tensor(sys.modules["torch"], value):
                return "take the tensor out of its graph: .detach()"
    return ""


def _advise_on_loop(error: BaseException, last: FrameType) -> str:
    """Return where to call what needs a running event loop."""
    code = last.f_code
    is_asyncio = str(last.f_globals.get("__name__")).partition(".")[0] == "asyncio"
    looks_up = code.co_name in _LOOPS or str(error) == "no running event loop"
    if type(error) is not RuntimeError or not is_asyncio or not looks_up:
        return ""
    is_running = sys.modules["asyncio"]._get_running_loop() is not None
    return "" if is_running else "no event loop runs in this thread: do it in a coroutine that asyncio.run() runs"


def _advise_on_yield(error: BaseException, last: FrameType) -> str:
    """Return which generator of contextlib.contextmanager has not yielded as a context must."""
    if type(error) is not RuntimeError or last.f_globals.get("__name__") != "contextlib":
        return ""
    generator = read_attributes(last.f_locals.get("self")).get("gen")
    if type(generator) is not GeneratorType:
        return ""
    code = generator.gi_code
    return f"let {code.co_name} (line {code.co_firstlineno}) yield exactly once"


def _advise_on_module(error: BaseException, last: FrameType) -> str:
    """Return which class of a module does not call the constructor of its base class first."""
    owner = last.f_locals.get("self")
    is_new = is_module(owner) and "_parameters" not in read_attributes(owner)
    is_known = isinstance(error, AttributeError) and is_new
    return f"call super().__init__() first in {list_names(type(owner))[0]}.__init__" if is_known else ""


def _advise_on_json(last: FrameType, ways: Mapping[int, str]) -> str:
    """Return how to convert a value that json cannot write."""
    value = last.f_locals.get("o", MISSING) if last.f_globals.get("__name__") == "json.encoder" else MISSING
    if last.f_code.co_name != "default" or value is MISSING:
        return ""
    names = list_names(type(value))
    conversion = next((_JSON[name] for name in names if name in _JSON), "")
    conversion = "dataclasses.asdict()" if find_member(type(value), "__dataclass_params__") is not None else conversion
    name = ways.get(id(value), f"the {names[0]}")
    return f"convert {name} for JSON, by {conversion or 'json.dump(…, default=…)'}"


def _advise_on_closed(
    error: BaseException, own: tuple[FrameType, ast.stmt, ast.AST], last: FrameType, tree: ast.Module | None
) -> str:
    """Return which object of Python's library is closed whose method has raised, and where the script has closed it."""
    frame, statement, expression = own
    function = expression.func if isinstance(expression, ast.Call) else None
    is_refusal = isinstance(statement, (ast.Raise, ast.Assert))
    # A with statement closes its file after any other error.
    if type(error) not in (RuntimeError, ValueError) or is_refusal or not isinstance(function, ast.Attribute):
        return ""
    node = function.value
    part, value = read_operand(frame, node)
    is_used = last is frame or last.f_locals.get("self") is value
    if part is not node or value is MISSING or not is_used or not _is_closed(value):
        return ""
    scope = None if tree is None else find_scope(tree, frame.f_code)
    line = 0 if scope is None else _find_closing(scope, ast.unparse(node), frame)
    place = f" since line {line}" if line else ""
    return f"{shorten_code(node)} is closed{place}: use it before, or open it again"


def _is_closed(value: Any) -> bool:
    for kind, name in _LAYERS:
        if type(value) is kind:
            try:
                value = find_member(kind, name).__get__(value)
            except (AttributeError, ValueError):  # it is detached
                return False
    if any(type(value) is plain for plain in _FILES):
        return find_member(type(value), "closed").__get__(value) is True
    module = find_module_name(type(value))
    if module == "_io" or not is_of_python(module):  # a peer may have closed it
        return False
    attributes = read_attributes(value)
    return any(attributes.get(state) is True for state in _STATES)


def _find_closing(scope: ast.AST, name: str, frame: FrameType) -> int:
    """Return the line that closes a named object, or starts the block whose end closes it; 0: unknown."""
    lines = []
    for node in ast.walk(scope):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            is_used = any(line.lineno <= frame.f_lineno <= (line.end_lineno or 0) for line in node.body)
            names = [item.optional_vars or item.context_expr for item in node.items]
            lines += [node.lineno for known in names if ast.unparse(known) == name and not is_used]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CLOSING:
            lines += [node.lineno] if ast.unparse(node.func.value) == name else []
    return lines[0] if len(set(lines)) == 1 else 0


def _advise_on_index(frame: FrameType, expression: ast.Subscript) -> str:
    """Return how to convert a tensor of floating numbers that is used as an index."""
    part, value = read_operand(frame, expression.slice)
    torch = sys.modules.get("torch")
    tensor = None if torch is None or part is not expression.slice else read_tensor(torch, value)
    name = shorten_code(expression.slice)
    return f"convert the index: {name}.long()" if tensor is not None and tensor.is_floating_point() else ""


def _advise_on_operands(error: BaseException, frame: FrameType, expression: ast.AST) -> str:
    """Return how to convert an operand that is too large, of several elements, or without a hash."""
    message = str(error) if isinstance(error, (RuntimeError, TypeError, ValueError, OverflowError)) else ""
    if isinstance(error, IndexError) and isinstance(expression, ast.Subscript):
        return _advise_on_index(frame, expression)
    is_hashed = type(error) is TypeError and "unhashable type: '" in message
    is_large = "overflow" in message.lower() or "too large to convert" in message
    nodes = _list_hashed(expression) if is_hashed else _list_numbers(frame, expression) if is_large else ()
    for node in nodes:
        part, value = read_operand(frame, node)
        kind = type(value)
        if part is not node or value is MISSING or not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            continue
        if is_hashed and kind in _HASHABLE and f"unhashable type: '{kind.__name__}'" in message:
            return f"{shorten_code(node)} has no hash: make it {_HASHABLE[kind]}"
        if not is_hashed and kind is int and value.bit_length() > _BITS:
            return f"{shorten_code(node)} has more than {_BITS} bits: reduce it (% 2**{_BITS})"
    return ""


def _list_hashed(expression: ast.AST) -> Iterator[ast.expr]:
    """Yield the keys and elements in code of which it takes the hash itself."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add":
            yield from node.args
        elif isinstance(node, ast.Set):
            yield from node.elts
        elif isinstance(node, ast.Dict):
            yield from filter(None, node.keys)


def _list_numbers(frame: FrameType, expression: ast.AST) -> Iterator[ast.expr]:
    """Yield what code passes to a function of torch or NumPy, also in a list."""
    function = expression.func if isinstance(expression, ast.Call) else None
    module = read_operand(frame, function.value)[1] if isinstance(function, ast.Attribute) else None
    if type(module) is not ModuleType or module.__name__.partition(".")[0] not in ("torch", "numpy"):
        return
    for node in expression.args if isinstance(expression, ast.Call) else ():
        yield from node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
