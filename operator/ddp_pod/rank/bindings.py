"""Where names and attributes of a source file get their values, in whichever function: its order is not known."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES: Final = (*_FUNCTIONS, ast.Lambda)
_CONSTRUCTOR: Final = "__init__"


class Binding(NamedTuple):
    """A value that a name or an attribute may get. ``scope``: the function or module whose names it uses."""

    value: ast.AST
    scope: ast.AST


class Bindings:
    """The values of a file's names and attributes: of functions what they return, of classes what their methods do."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: dict[str, list[Binding]] = defaultdict(list)
        self._attributes: dict[str, list[Binding]] = defaultdict(list)
        self._arguments: dict[str, list[Binding]] = defaultdict(list)  # by the name that is called
        self._called: dict[int, str] = {}  # of each function
        self._outer: dict[int, list[ast.AST]] = {id(tree): []}
        self._locals: dict[int, set[str]] = {id(tree): set()}
        waiting: list[tuple[ast.AST, ast.AST, ast.ClassDef | None]] = [(tree, tree, None)]
        while waiting:
            node, scope, owner = waiting.pop()
            for child in ast.iter_child_nodes(node):
                self._add(child, scope, owner)
                if isinstance(child, _SCOPES):
                    self._open(child, scope)
                    waiting.append((child, child, None))
                else:
                    waiting.append((child, scope, child if isinstance(child, ast.ClassDef) else owner))

    def list_of_name(self, scope: ast.AST, name: str) -> list[Binding]:
        """Return what a name may get that code of a scope reads."""
        return self._select(self._names.get(name, ()), scope, name)

    def _select(self, known: Sequence[Binding], scope: ast.AST, name: str) -> list[Binding]:
        """Return those for whose code the name is the same variable as for a scope."""
        if name in self._locals.get(id(scope), ()):
            return [binding for binding in known if binding.scope is scope]
        outer = (scope, *self._outer.get(id(scope), ()))
        return [
            binding
            for binding in known
            if binding.scope in outer or name not in self._locals.get(id(binding.scope), ())
        ]

    def list_of_attribute(self, name: str) -> list[Binding]:
        """Return what an attribute of this name may get, of whatever object."""
        return self._attributes.get(name, [])

    def list_arguments(self, scope: ast.AST) -> list[Binding]:
        """Return the arguments with which the file calls a function of its own."""
        return self._arguments.get(self._called.get(id(scope), ""), [])

    def _open(self, function: "ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda", outer: ast.AST) -> None:
        names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        shared: set[str] = set()
        for node in walk_scope(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                shared.update(node.names)
        self._locals[id(function)] = names - shared
        self._outer[id(function)] = [outer, *self._outer[id(outer)]]

    def _add(self, node: ast.AST, scope: ast.AST, owner: ast.ClassDef | None) -> None:
        if isinstance(node, _FUNCTIONS):
            results = [Binding(value, node) for value in _list_results(node)]
            if owner is not None:
                self._names[owner.name] += results
            (self._names if owner is None else self._attributes)[node.name] += results
            self._called[id(node)] = owner.name if owner is not None and node.name == _CONSTRUCTOR else node.name
        if isinstance(node, ast.Call):
            called = str(getattr(node.func, "attr", None) or getattr(node.func, "id", ""))
            values = (*node.args, *(keyword.value for keyword in node.keywords))
            self._arguments[called] += [Binding(value, scope) for value in values]
        for target, value in _list_bound(node):
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute):
                    self._attributes[part.attr].append(Binding(value, scope))
                elif isinstance(part, ast.Name):
                    table = self._names if owner is None else self._attributes
                    table[part.id].append(Binding(value, scope))


def walk_scope(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of functions and classes in it."""
    waiting = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if not isinstance(child, (*_SCOPES, ast.ClassDef)):
                yield child
                waiting.append(child)


def _list_results(function: ast.AST) -> Iterator[ast.AST]:
    for node in walk_scope(function):
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None:
            yield node.value


def _list_bound(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield what code binds or fills, and what that gets: a value, an iterator, an argument of its method."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from ((node.func.value, argument) for argument in node.args)
