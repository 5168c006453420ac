"""The statement and the expression of a source file that an instruction belongs to, and what these read."""

import ast
import linecache
import warnings
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any, Final

_INNER_SCOPES: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_BLOCKS: Final = (ast.stmt, ast.ExceptHandler, *filter(None, [getattr(ast, "match_case", None)]))
_HEADERS: Final = ("test", "iter", "subject", "value")  # of statements: what they evaluate first


_MOST_BYTES: Final = 1 << 17  # of a source file, whose tree takes hundred times as much


@lru_cache(4)  # an exception passes through a few files
def parse_file(path: str) -> ast.Module | None:
    """Return the tree of a source file; None without one, or of a large one. Raises: what the file causes."""
    source = "".join(linecache.getlines(path))
    return parse(source) if 0 < len(source) <= _MOST_BYTES else None


@lru_cache(1)  # the exceptions of a chain are often of one file
def parse(source: str) -> ast.Module:
    """Return the tree of a source file. Raises: what the file causes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when it was compiled, and the script may handle them
        return ast.parse(source)


def find_position(code: CodeType, instruction: int) -> tuple[int | None, ...]:
    """Return first and last line, first and last column of an instruction; empty before Python 3.11."""
    list_positions = getattr(code, "co_positions", None)
    return () if list_positions is None else next(islice(list_positions(), instruction // 2, None), ())


def find_path(node: ast.AST, line: int, column: int | None) -> list[ast.AST]:
    """Return the statements that contain a line and column, and the blocks between them, the outermost first.

    ``column``: None: unknown.
    """
    path = [node]
    while True:
        blocks = (child for child in ast.iter_child_nodes(path[-1]) if isinstance(child, _BLOCKS))
        block = next((block for block in blocks if _has_place(block, line, column)), None)
        if block is None:
            return path
        path.append(block)


def _has_place(node: Any, line: int, column: int | None) -> bool:
    nodes = [node] if hasattr(node, "lineno") else node.body
    if column is None:
        return any(part.lineno <= line <= part.end_lineno for part in nodes)
    ends = (((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)) for part in nodes)
    return any(start <= (line, column) < end for start, end in ends)


def find_expression(path: list[ast.AST], position: tuple[int | None, ...]) -> tuple[ast.stmt | None, ast.AST | None]:
    """Return the statement that runs and the expression at a position; without one what the statement evaluates."""
    statements = [node for node in reversed(path) if isinstance(node, ast.stmt)]
    for statement in statements:
        for node in _walk(statement):
            if not isinstance(node, ast.expr) or get_position(node) != position:
                continue
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                return statement, statement
            if any(list_operands(node)):
                return statement, node
    running = [statement for statement in statements if get_position(statement) == position] or statements
    first = next(iter(running), None)
    headers = [getattr(first, name, None) for name in _HEADERS]
    headers += [item.context_expr for item in getattr(first, "items", ())[:1]]
    expression = next((header for header in headers if isinstance(header, ast.expr)), None)
    is_block = hasattr(first, "body") and expression is None  # which has run only in part
    return None if is_block else first, expression


def get_position(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    """Return first and last line, first and last column of code."""
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, except other statements."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _BLOCKS):
            yield from _walk(child)


def list_operands(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the names, attributes and items that code reads, in its order."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        is_read = isinstance(node.ctx, ast.Load)
        if is_read:
            yield node
        root = find_root(node)
        yield from () if isinstance(root, ast.Name) else list_operands(root)
        if isinstance(node, ast.Subscript):
            yield from () if is_read else list_operands(node.value)
            yield from () if isinstance(node.slice, ast.Constant) else list_operands(node.slice)
    elif not isinstance(node, (*_INNER_SCOPES, ast.ExceptHandler)):
        for child in ast.iter_child_nodes(node):
            yield from list_operands(child)


def find_root(node: ast.expr) -> ast.expr:
    """Return of what an attribute or an item is read in the end: in ``scores.cpu().numpy`` the call."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node
