"""The possible mutations of a module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
NAMES = {"all": "any", "any": "all", "min": "max", "max": "min"}
# Arguments without an effect on behaviour: a mutation there proves nothing.
NO_EFFECT = {"encoding", "strict", "daemon", "flush", "slots", "frozen", "kw_only", "name", "help", "description"}
NOT_CODE = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Mutation:
    """One change of a parsed module, which ``apply`` makes in place."""

    line: int
    what: str
    apply: Callable[[], None]
    statement: range = range(0)
    """The lines of the statement; for a compound statement, those of its head."""


def mutations(tree: ast.AST) -> Iterator[Mutation]:
    """Yield the possible changes of a parsed module, in the order of its lines; the same for the same source."""
    yield from sorted(_below(tree, range(0)), key=lambda mutation: mutation.line)


def mutate(source: str, number: int) -> tuple[ast.Module, Mutation]:
    """Return a newly parsed module with the mutation of this number applied."""
    tree = ast.parse(source)
    mutation = list(mutations(tree))[number]
    mutation.apply()
    return ast.fix_missing_locations(tree), mutation


def _below(node: ast.AST, statement: range) -> Iterator[Mutation]:
    for name, value in ast.iter_fields(node):
        if name in NOT_CODE:
            continue
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        for index, child in enumerate(children):
            if (
                isinstance(child, ast.Assert)
                or (isinstance(child, ast.keyword) and child.arg in NO_EFFECT)
                or _is_log(child)
                or _is_pause(child)
                or (isinstance(child, ast.If) and _is_about_types(child))
            ):
                continue
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                statement = _head(child)
            if isinstance(child, ast.stmt):
                yield from (replace(item, statement=statement) for item in _dropped(value, index, child))
            yield from (replace(item, statement=statement) for item in _of(child))
            yield from _below(child, statement)


def _head(node: ast.stmt | ast.excepthandler | ast.match_case) -> range:
    first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
    body = getattr(node, "body", None)
    return range(first, max(body[0].lineno if body else getattr(node, "end_lineno", first) + 1, first + 1))


def _change(node: ast.AST, description: str, target: object, name: str, value: object) -> Mutation:
    return Mutation(getattr(node, "lineno", 0), description, lambda: setattr(target, name, value))


def _of(node: ast.AST) -> Iterator[Mutation]:
    yield from _mutate_operator(node)
    if isinstance(node, ast.Constant):
        yield from _mutate_constant(node)
    if isinstance(node, ast.Call):
        yield from _mutate_call(node)


def _mutate_operator(node: ast.AST) -> Iterator[Mutation]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS and not _reads_clock(node):
            inverse = COMPARISONS[type(operator)]()
            yield _change(node, f"{type(operator).__name__} → {type(inverse).__name__}", node, "ops", [inverse])
        case ast.BoolOp(op=ast.And()):
            yield _change(node, "and → or", node, "op", ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield _change(node, "or → and", node, "op", ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield _change(node, "not dropped", node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _has_text(node):
            inverse_op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield _change(node, f"{type(node.op).__name__} → {type(inverse_op).__name__}", node, "op", inverse_op)


def _mutate_constant(node: ast.Constant) -> Iterator[Mutation]:
    match node.value:
        case bool() as flag:
            yield _change(node, f"{flag} → {not flag}", node, "value", not flag)
        case int() | float() as number:
            # A change of one in a large limit has no effect that a test could show.
            changed = number + 1 if number < 10 else 2 * number
            yield _change(node, f"{number} → {changed}", node, "value", changed)


def _mutate_call(node: ast.Call) -> Iterator[Mutation]:
    if isinstance(node.func, ast.Name) and node.func.id in NAMES:
        inverse = NAMES[node.func.id]
        yield _change(node, f"{node.func.id} → {inverse}", node.func, "id", inverse)
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in NO_EFFECT:
            remaining = [argument for argument in node.keywords if argument is not keyword]
            yield _change(node, f"{keyword.arg}= dropped", node, "keywords", remaining)


def _dropped(statements: list[ast.stmt], index: int, node: ast.stmt) -> Iterator[Mutation]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue():
            pass
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            pass
        case _:
            return
    description = ast.unparse(node).splitlines()[0][:60]
    # Still compiled: a function without its only ``super()`` has another shape, and could not be replaced.
    never = ast.If(ast.Constant(False), [node], [])
    yield Mutation(node.lineno, f"dropped: {description}", lambda: statements.__setitem__(index, never))


def _has_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _is_about_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _is_log(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith(("logger.", "logging.", "log."))


def _is_pause(node: ast.AST) -> bool:
    """Return whether a statement only waits: no test asserts a duration."""
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("time.sleep(", "await asyncio.sleep("))


def _reads_clock(node: ast.Compare) -> bool:
    """Return whether a comparison reads the clock, where ``<`` and ``<=`` are equivalent."""
    bounds = isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return bounds and any(f"time.{clock}()" in ast.unparse(node) for clock in ("monotonic", "time", "perf_counter"))
