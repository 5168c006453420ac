"""The mutations that `make mutate` tries: they are made, they are the same for the same seed, and their tests exist."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.mutations import mutate, mutations
from tests.mutation.nearest import TABLE, find_modules, find_tests


@pytest.mark.parametrize(
    ("source", "mutated"),
    [
        ("a == b", "a != b"),
        ("a < b", "a <= b"),
        ("a not in b", "a in b"),
        ("a and b", "a or b"),
        ("not a", "not (not a)"),
        ("a - b", "a + b"),
        ("x = 1", "x = 2"),
        ("x = True", "x = False"),
        ("all(a)", "any(a)"),
        ("f(a, key=b)", "f(a)"),
        ("f(a)", "pass"),
        ("x.y = a", "pass"),
        ("raise error", "pass"),
        ("x += y", "pass"),
    ],
)
def test_a_line_can_be_changed(source: str, mutated: str) -> None:
    found = range(len(list(mutations(ast.parse(source)))))
    assert ast.unparse(ast.parse(mutated)) in [ast.unparse(mutate(source, number)[0]) for number in found]


@pytest.mark.parametrize(
    "source",
    [
        "assert a == 1",
        "logger.info('x', y)",
        "if TYPE_CHECKING:\n    x = 1",
        "a: Literal[1]",
        "'text'",
        "open(encoding='x')",
    ],
)
def test_what_no_test_has_to_notice_is_left_alone(source: str) -> None:
    assert [one.what for one in mutations(ast.parse(source)) if not one.what.startswith("dropped: open")] == []


def test_every_row_of_the_table_has_modules_and_every_module_tests() -> None:
    found = {name: (row, find_tests(name, row)) for name, row in find_modules()}
    assert [row.modules for row in TABLE if row not in [used for used, _ in found.values()]] == []
    assert [name for name, (_, tests) in found.items() if not tests] == []
