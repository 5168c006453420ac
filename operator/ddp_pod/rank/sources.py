"""What the values come from that failing code has worked on, where another attempt may get others.

A network, another process, another rank, the machine, a clock, a generator of random numbers. From the failing
expression, or the condition of a raise, back over the assignments of its names, the functions that the script has
called, and the arguments of its callers. No code of the script runs.
"""

import ast
import builtins
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Final, NamedTuple

from ..base.exceptions import CLOCK, FILE, LIBRARY, MACHINE, NETWORK, PROCESS, RANDOM, SIGNAL
from .bindings import Binding, Bindings
from .calls import find_scope
from .script_objects import find_member, find_module_name, is_instance
from .source_files import is_changing
from .statements import find_expression, find_path, find_position, parse_file
from .values import MISSING, read_operand

_MOST_NODES: Final = 2000
_MOST_FRAMES: Final = 4
_MOST_TEXT: Final = 1000  # characters of a value
_DEEPEST: Final = 3  # functions that the script calls
_NETWORKS: Final = {
    "socket", "ssl", "ftplib", "smtplib", "imaplib", "xmlrpc.client", "requests",
    "httpx", "aiohttp", "urllib3", "grpc", "botocore", "boto3", "websocket", "websockets", "zmq", "redis", "pymongo",
    "psycopg", "psycopg2", "huggingface_hub", "asyncio.streams", "urllib", "http",
}  # fmt: skip
_PROCESSES: Final = {
    "subprocess", "multiprocessing.connection", "multiprocessing.queues", "multiprocessing.managers",
    "multiprocessing.pool", "_multiprocessing", "concurrent.futures.process",
}  # fmt: skip
_OF_OS: Final = {
    **dict.fromkeys(("popen", "system", "wait", "waitpid", "waitid", "read"), PROCESS),
    **dict.fromkeys(("exists", "lexists", "isfile", "isdir", "islink", "getsize", "getmtime"), MACHINE),
    **dict.fromkeys(
        ("stat", "statvfs", "listdir", "scandir", "walk", "access", "getloadavg", "kill", "disk_usage"), MACHINE
    ),
    "urandom": RANDOM,
}
_OS: Final = {"os", "posix", "posixpath", "genericpath", "shutil"}
_OF_PATHS: Final = {"exists", "is_file", "is_dir", "is_symlink", "stat", "iterdir", "glob", "rglob"}
_MACHINES: Final = {"glob", "psutil", "pynvml", "resource", "torch.cuda", "fcntl"}
_RANDOM: Final = {"random", "secrets", "numpy.random"}  # torch begins with the same seed in each process
_COLLECTIVES: Final = {
    "torch.distributed.distributed_c10d", "torch._C._distributed_c10d", "torch.distributed._functional_collectives",
}  # fmt: skip
_NOW: Final = {"now", "utcnow", "today"}
_STATUSES: Final = ("returncode", "exitcode")
_LAYOUT: Final = {"shape", "size", "dim", "ndim", "dtype", "device", "numel", "len", "isinstance", "type", "hasattr"}
_WAITS: Final = {"wait", "wait_for", "acquire", "is_set", "is_alive"}  # of threading, for other threads
_ADDRESS: Final = re.compile(r"\b(?!file:)[a-z][a-z0-9+]*://\w")


class _Scope(NamedTuple):
    """Code whose names are looked up. ``tree``: its function, or the module; ``read``: see ``read_operand``.

    ``path``: of its file; ``table``: the names of its module; ``depth``: how many others lead to it.
    """

    tree: ast.AST
    path: str
    table: dict[str, Any]
    read: Callable[[ast.expr], tuple[ast.expr, Any]]
    depth: int = 0

    @property
    def parameters(self) -> list[str]:
        """The names of the function's parameters."""
        arguments = getattr(self.tree, "args", None)
        return [node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)] if arguments else []


class _Code(NamedTuple):
    """The code of a frame that runs. ``path``: the statements and blocks around it, the outermost first."""

    path: list[ast.AST]
    statement: ast.stmt | None
    expression: ast.AST | None


def find_sources(traces: Sequence[TracebackType], since: float) -> str:
    """Return from where the values of failing code come, as words of ``base.exceptions``; empty: nothing is known.

    ``since``: when the rank started. Raises: anything that a source file or a value may cause.
    """
    search = _Search(since)
    search.add_handlers(traces)
    search.add_libraries(traces)
    is_script = False
    for trace in islice(reversed(traces), _MOST_FRAMES):
        was_script = is_script
        is_script = not LIBRARY.search(trace.tb_frame.f_code.co_filename)
        if was_script and not is_script:
            break  # a library calls the script, such as a dataset
        scope = _build_scope(trace.tb_frame)
        if scope is None:
            continue
        code = _find_code(scope, trace)
        search.add_call(scope, code)
        if not search.explore(scope, _list_decisive(scope, code)) and is_script:
            break
    return " ".join(sorted(search.found))


class _Search:
    """``found``: the sources so far. ``since``: when the rank started."""

    def __init__(self, since: float) -> None:
        self.found: set[str] = set()
        self._since = since
        self._seen: set[tuple[int, bool]] = set()
        self._names: set[tuple[int, str, bool]] = set()
        self._bindings: dict[str, Bindings] = {}  # of each file
        self._failed: set[int] = set()  # calls that have returned nothing
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        self._handlers = [handler.__code__ for handler in handlers if type(handler) is FunctionType]

    def add_handlers(self, traces: Sequence[TracebackType]) -> None:
        """Add that a signal has called the code that raised."""
        if any(trace.tb_frame.f_code is code for trace in traces for code in self._handlers):
            self.found.add(SIGNAL)

    def add_libraries(self, traces: Sequence[TracebackType]) -> None:
        """Add that a library which uses the network has raised."""
        for trace in reversed(traces):
            if not LIBRARY.search(trace.tb_frame.f_code.co_filename):
                return
            name = trace.tb_frame.f_globals.get("__name__")
            if type(name) is str and _uses_network(name):
                self.found.add(NETWORK)

    def add_call(self, scope: _Scope, code: _Code) -> None:
        """Add what the call that failed has read itself: nothing has come from it yet."""
        call = code.expression
        if isinstance(call, ast.Call):
            self._failed.add(id(call))
            if is_changing(call, scope.read, self._since):
                self.found.add(FILE)

    def explore(self, scope: _Scope, nodes: Sequence[ast.AST]) -> bool:
        """Add the sources of nodes. Returns whether these depend on the scope's arguments."""
        waiting = deque((scope, node, False) for node in nodes)
        depends = False
        while waiting and len(self._seen) < _MOST_NODES:
            scope, node, is_layout = waiting.popleft()
            if (id(node), is_layout) in self._seen:
                continue
            self._seen.add((id(node), is_layout))
            is_layout = is_layout or _is_layout(node)
            waiting.extend((scope, child, is_layout) for child in ast.iter_child_nodes(node))
            if isinstance(node, ast.Call):
                waiting.extend((*item, is_layout) for item in self._call(scope, node, is_layout=is_layout))
            elif isinstance(node, ast.Constant):
                self._add_address(scope, node.value)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                self._add_owner(scope, node)
                depends = depends or (scope.depth == 0 and getattr(node, "id", "") in scope.parameters)
                name = node.id if isinstance(node, ast.Name) else f".{node.attr}"
                key = (id(scope.tree), name, is_layout)
                if key not in self._names:
                    self._names.add(key)
                    waiting.extend((*item, is_layout) for item in self._follow(scope, node))
        return depends

    def _follow(self, scope: _Scope, node: "ast.Name | ast.Attribute") -> list[tuple[_Scope, ast.AST]]:
        """Return what a name or an attribute may have got, with the code that has given it."""
        file = self._index(scope)
        if file is None:
            return []
        is_library = LIBRARY.search(scope.path)
        if isinstance(node, ast.Attribute):
            bindings = [] if is_library else file.list_of_attribute(node.attr)
        else:
            bindings = file.list_of_name(scope.tree, node.id)
            if scope.depth and node.id in scope.parameters:
                bindings = bindings + file.list_arguments(scope.tree)
        if is_library:
            bindings = [binding for binding in bindings if binding.scope is scope.tree]
        inner = [(self._enter(scope, binding), binding.value) for binding in bindings]
        return [item for item in inner if item[0].depth <= _DEEPEST]

    def _index(self, scope: _Scope) -> Bindings | None:
        if scope.path not in self._bindings:
            tree = parse_file(scope.path)
            if tree is None:
                return None
            self._bindings[scope.path] = Bindings(tree)
        return self._bindings[scope.path]

    def _enter(self, scope: _Scope, binding: Binding) -> _Scope:
        if binding.scope is scope.tree:
            return scope
        lines = {binding.scope.lineno} if isinstance(binding.scope, (ast.FunctionDef, ast.Lambda)) else set()
        if any(code.co_filename == scope.path and code.co_firstlineno in lines for code in self._handlers):
            self.found.add(SIGNAL)
        return _build_inner_scope(binding.scope, scope.path, scope.table, scope.depth + 1)

    def _call(self, scope: _Scope, call: ast.Call, *, is_layout: bool) -> list[tuple[_Scope, ast.AST]]:
        """Add the source of a call. Returns what the function returns, if it is one of the script."""
        if any(keyword.arg == "timeout" for keyword in call.keywords):
            self.found.add(CLOCK)
        if is_changing(call, scope.read, self._since):
            self.found.add(FILE)
        function = _read_function(scope, call.func)
        if function is MISSING or function is None:
            return []
        source = _find_source(function, scope)
        has_begun_process = source == PROCESS and id(call) in self._failed
        if source and not has_begun_process and not (is_layout and source in (RANDOM, CLOCK)):
            self.found.add(source)
        if getattr(function, "__module__", None) in _COLLECTIVES:
            return []  # what other ranks send is the same in each attempt
        inner = _build_function_scope(function, scope.depth + 1) if scope.depth < _DEEPEST else None
        if inner is None:
            return []
        results = (node.value for node in ast.walk(inner.tree) if isinstance(node, (ast.Return, ast.Yield)))
        return [(inner, value) for value in results if value is not None]

    def _add_address(self, scope: _Scope, value: Any) -> None:
        if type(value) is str and _ADDRESS.search(value[:_MOST_TEXT]) and not LIBRARY.search(scope.path):
            self.found.add(NETWORK)

    def _add_owner(self, scope: _Scope, node: "ast.Name | ast.Attribute") -> None:
        if isinstance(node, ast.Attribute) and node.attr in _STATUSES:
            self.found.add(PROCESS)
        part, value = scope.read(node)
        if part is not node or value is MISSING:
            return
        self._add_address(scope, value)
        if not is_instance(value, type, ModuleType, FunctionType):
            module = find_module_name(type(value))
            if _is_below(module, _PROCESSES):
                self.found.add(PROCESS)
            elif _uses_network(module):
                self.found.add(NETWORK)


def _is_layout(node: ast.AST) -> bool:
    """Return whether code reads only what does not depend on a tensor's numbers."""
    function = node.func if isinstance(node, ast.Call) else node
    name = getattr(function, "attr", None) or getattr(function, "id", None)
    return name in _LAYOUT and isinstance(node, (ast.Call, ast.Attribute))


def _read_function(scope: _Scope, node: ast.expr) -> Any:
    """Return the function that code calls; MISSING: unknown."""
    part, value = scope.read(node)
    if part is node or not isinstance(node, ast.Attribute) or part is not node.value or value is MISSING:
        return value if part is node else MISSING
    member = find_member(value if is_instance(value, type) else type(value), node.attr)
    kind = find_module_name(type(value))
    is_reached = _uses_network(kind) or _is_below(kind, _PROCESSES)
    member = getattr(member, "__func__", member)
    return type(value) if is_reached else MISSING if member is None else member


def _find_source(function: Any, scope: _Scope) -> str:
    """Return what a function reads; empty: nothing from outside."""
    owner = getattr(function, "__self__", None) if type(function) in (BuiltinFunctionType, MethodType) else None
    module = find_module_name(function) if is_instance(function, type) else getattr(function, "__module__", None)
    if type(module) is not str:
        kind: Any = owner if is_instance(owner, type) else getattr(function, "__objclass__", type(owner))
        module = find_module_name(kind)
    name = getattr(function, "__name__", "")
    return _name_source(module, name if type(name) is str else "", scope)


def _name_source(module: str, name: str, scope: _Scope) -> str:
    if module in _OS:
        return _OF_OS.get(name, "")
    if module.partition(".")[0] == "pathlib":
        return MACHINE if name in _OF_PATHS else ""
    is_wait = module in ("threading", "_thread") and name in _WAITS
    if is_wait or module == "time" or (module == "datetime" and name in _NOW):
        return CLOCK
    if _is_below(module, _RANDOM):
        return "" if _is_seeded(scope) else RANDOM
    if _is_below(module, _MACHINES):
        return MACHINE
    if _is_below(module, _PROCESSES):
        return PROCESS
    return NETWORK if _uses_network(module) else ""


def _is_below(module: str, modules: "set[str]") -> bool:
    parts = module.split(".")
    return any(".".join(parts[: number + 1]) in modules for number in range(len(parts)))


def _uses_network(name: str) -> bool:
    """Return whether a module is one of a client of the network, or one beside which its package has such a client."""
    package = name.partition(".")[0]
    if _is_below(name, _NETWORKS):
        return True
    if package in ("torch", "builtins", "__main__") or package in sys.stdlib_module_names:
        return False
    module = sys.modules.get(name)
    if module is None or not LIBRARY.search(getattr(module, "__file__", None) or ""):
        return False
    names = set(_list_used(module))
    beside = [sys.modules.get(used) for used in names if used.partition(".")[0] == package and used != package]
    names.update(used for other in beside if type(other) is ModuleType for used in _list_used(other))
    return any(_is_below(used, _NETWORKS) for used in names)


def _list_used(module: ModuleType) -> Iterator[str]:
    """Yield the names of the modules that a module has imported, or from which it has imported a function."""
    for value in list(vars(module).values()):
        if type(value) is ModuleType:
            yield value.__name__
        elif type(value) is FunctionType and value.__module__ != module.__name__:
            yield str(value.__module__)


def _build_scope(frame: FrameType) -> _Scope | None:
    path = frame.f_code.co_filename
    tree = parse_file(path)
    scope = None if tree is None else find_scope(tree, frame.f_code)
    return None if scope is None else _Scope(scope, path, frame.f_globals, lambda node: read_operand(frame, node))


def _build_inner_scope(tree: ast.AST, path: str, table: dict[str, Any], depth: int) -> _Scope:
    names = {**vars(builtins), **table}
    return _Scope(tree, path, table, lambda node: _read_global(names, node), depth)


def _build_function_scope(function: Any, depth: int) -> _Scope | None:
    """Return the scope of a function of the script; None: it is no such function."""
    if type(function) is not FunctionType or LIBRARY.search(function.__code__.co_filename):
        return None
    path = function.__code__.co_filename
    tree = parse_file(path)
    scope = None if tree is None else find_scope(tree, function.__code__)
    return None if scope is None else _build_inner_scope(scope, path, function.__globals__, depth)


def _read_global(table: "dict[str, Any]", node: ast.expr) -> tuple[ast.expr, Any]:
    """Read a name of a module, or a function of a module that it has imported."""
    if isinstance(node, ast.Name):
        return node, table.get(node.id, MISSING)
    if isinstance(node, ast.Attribute):
        part, owner = _read_global(table, node.value)
        if part is node.value and type(owner) is ModuleType:
            return node, vars(owner).get(node.attr, MISSING)
        return part, owner
    return node, MISSING


def _is_seeded(scope: _Scope) -> bool:
    """Return whether the script calls a function that sets a seed."""
    tree = parse_file(scope.path)
    names = (getattr(node, "attr", "") or getattr(node, "id", "") for node in ast.walk(tree or ast.Module([], [])))
    return any("seed" in name for name in names if type(name) is str)


def _find_code(scope: _Scope, trace: TracebackType) -> _Code:
    position = find_position(trace.tb_frame.f_code, trace.tb_lasti)
    path = find_path(scope.tree, trace.tb_lineno, position[2] if position else None)
    return _Code(path, *find_expression(path, position))


def _list_decisive(scope: _Scope, code: _Code) -> list[ast.AST]:
    """Return the conditions of a raise, or the expression that failed."""
    path, statement, expression = code
    if statement is None:
        return []
    if not _is_check(statement, expression):
        return _list_operands(expression) if isinstance(expression, ast.Call) else [expression or statement]
    blocks = path[1 : path.index(statement) + 1]
    tests: list[ast.AST] = [node.test for node in blocks if isinstance(node, (ast.If, ast.While, ast.Assert))]
    if tests or not isinstance(scope.tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return tests
    return [node for node in ast.walk(scope.tree) if isinstance(node, ast.Call) and node.lineno < statement.lineno]


def _list_operands(call: ast.Call) -> list[ast.AST]:
    """Return what the function of a call works on."""
    owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [*owner, *call.args, *(keyword.value for keyword in call.keywords)]


def _is_check(statement: ast.stmt, expression: ast.AST | None) -> bool:
    """Return whether a statement does nothing but raise or exit."""
    call = expression if isinstance(expression, ast.Call) else None
    is_exit = isinstance(statement, ast.Expr) and call is not None and "exit" in ast.unparse(call.func)
    return is_exit or isinstance(statement, (ast.Raise, ast.Assert))
