"""Every name of PyTorch that the launcher uses. ``pytest tests/golden --update-golden`` writes the list.

The launcher runs in users' images with any release of PyTorch, so it uses public names. The private ones are methods
that torch documents for subclasses of its agent, and names whose absence the launcher handles.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

LAUNCHER = Path(ROOT, "operator", "ddp_pod")
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
PRIVATE = {
    f"{_AGENT}._assign_worker_ranks",
    f"{_AGENT}._exit_barrier",
    f"{_AGENT}._monitor_workers",
    f"{_AGENT}._remaining_restarts",
    f"{_AGENT}._rendezvous",
    f"{_AGENT}._restart_workers",
    f"{_AGENT}._shutdown",
    f"{_AGENT}._start_workers",
    # Nothing public reads a script's tensor, or runs an operation on one, without the script's own subclass or mode.
    "torch._C",
    "torch._C.DisableTorchFunction",
    "torch._C._DisableTorchDispatch",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    # Nothing public reads the flight recorder as JSON. Without them a hang is described by the ranks' stacks alone.
    "torch._C._distributed_c10d._dump_fr_trace_json",
    "torch._C._distributed_c10d._dump_nccl_trace_json",
    # A rank without them records no process group, which then stays unknown.
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d._update_default_pg",
    # Nothing public takes an exception from a DataLoader worker, or a process of spawn(), to its rank, whose values are
    # unknown without them.
    "torch._utils.ExceptionWrapper",
    "torch._utils.ExceptionWrapper.__init__",
    "torch.multiprocessing.spawn._wrap",
    # Of `ddp check` only: the record of a rank ends without them.
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
    "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
    "torch.utils.data.dataloader._BaseDataLoaderIter._reset",
}


class TorchNames(ast.NodeVisitor):
    """Collects the names of torch in one module, by their full path."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._roots = {"torch": "torch"}
        self._modules: dict[str, str] = {}  # constants with the name of a module

    def resolve(self, node: ast.AST) -> str | None:
        """Return the full name of an expression that is a name of torch; None for any other."""
        match node:
            case ast.Name(id=name):
                return self._roots.get(name)
            case ast.Attribute(value=owner, attr=name):
                full_name = self.resolve(owner)
                return None if full_name is None else f"{full_name}.{name}"
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value=str(name))):
                return name if name.split(".")[0] == "torch" else None
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                return name if name.split(".")[0] == "torch" else None
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
                full_name = self.resolve(owner)
                return None if full_name is None else f"{full_name}.{name}"
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                self._roots[alias.asname or alias.name] = full
                self.names.add(full)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._bind(node.targets, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind([node.target], node.value)
        self.generic_visit(node)

    def _bind(self, targets: list[ast.expr], value: ast.AST) -> None:
        full_name = self.resolve(value)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                self._modules[target.id] = str(value.value)
            if full_name is not None and isinstance(target, ast.Name):
                self._roots[target.id] = full_name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._add(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._add(node)
        self.generic_visit(node)

    def _add(self, node: ast.AST) -> None:
        full_name = self.resolve(node)
        if full_name is not None:
            self.names.add(full_name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [self.resolve(base) for base in node.bases]
        if "ImportHook" in [getattr(base, "id", "") for base in node.bases]:
            self._roots.pop("module", None)
            if hooked := self._find_hooked_module(node):
                self._roots["module"] = hooked
            self.names |= set(_list_wrapped(node))
        for base in bases:
            if base is not None:
                self.names |= {f"{base}.{name}" for name in _list_inherited(node, base)}
        self.generic_visit(node)

    def _find_hooked_module(self, node: ast.ClassDef) -> str:
        """Return the module that an import hook waits for: the argument of its base class; empty for a parameter."""
        for call in (item for item in ast.walk(node) if isinstance(item, ast.Call)):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Call(), attr="__init__"), args=[ast.Name(id=name)]):
                    return self._modules.get(name, "")
                case ast.Call(func=ast.Attribute(value=ast.Call(), attr="__init__"), args=[ast.Constant(value=name)]):
                    return str(name)
        raise AssertionError(f"{node.name} names no module")


def _list_inherited(node: ast.ClassDef, base: str) -> Iterator[str]:
    """Yield the members of a base class that its subclass overrides or uses."""
    module, _, name = base.rpartition(".")
    members = set(dir(getattr(importlib.import_module(module), name)))
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    own = {function.name for function in functions}
    assigned = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and _is_self(item.value)
    }
    initialized = {
        item.attr
        for function in functions
        if function.name == "__init__"
        for item in ast.walk(function)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    }
    yield from sorted(own & members)
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and _is_self(item.value) and item.attr not in own | initialized:
            yield item.attr
    yield from sorted(assigned - own - initialized)


def _list_wrapped(node: ast.ClassDef) -> Iterator[str]:
    """Yield the functions of distributed_c10d that an import hook replaces: the keys of its table."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    tables = [item for item in ast.walk(node) if isinstance(item, ast.Dict)]
    for key in (key for table in tables for key in table.keys):
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and hasattr(module, key.value):
            yield f"{module.__name__}.{key.value}"


def _is_self(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id == "self"


def collect(source: str) -> set[str]:
    """Return the names of torch in a module."""
    names = TorchNames()
    names.visit(ast.parse(source))
    return names.names


def is_private(name: str) -> bool:
    """Return whether a part of a name is private."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_launcher_uses_the_listed_names_of_torch(golden: Callable[[str, str], None]) -> None:
    names = set().union(*(collect(path.read_text(encoding="utf-8")) for path in LAUNCHER.rglob("*.py")))
    golden("torch-names.txt", "".join(f"{name}\n" for name in sorted(names)))
    assert {name for name in names if is_private(name)} == PRIVATE
    assert len(PRIVATE) <= 24


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.distributed import _private", "torch.distributed._private"),
        ("import torch\ntorch.cuda._lazy_init()", "torch.cuda._lazy_init"),
        ("torch = importlib.import_module('torch')\ntorch._C", "torch._C"),
        ("importlib.import_module('torch.distributed')._x", "torch.distributed._x"),
        ("run = importlib.import_module('torch.distributed.run')\ngetattr(run, '_parse', None)",
         "torch.distributed.run._parse"),
        ("sys.modules['torch']._dynamo", "torch._dynamo"),
        (f"from {_AGENT.rpartition('.')[0]} import LocalElasticAgent\n"
         "class Own(LocalElasticAgent):\n def run(self):\n  self._pcontext.close()", f"{_AGENT}._pcontext"),
        (f"from {_AGENT.rpartition('.')[0]} import LocalElasticAgent\n"
         "class Own(LocalElasticAgent):\n def _setup_healthcheck(self):\n  pass", f"{_AGENT}._setup_healthcheck"),
    ],
)  # fmt: skip
def test_private_name_of_torch_is_found(source: str, name: str) -> None:
    assert name in set(filter(is_private, collect(source)))
