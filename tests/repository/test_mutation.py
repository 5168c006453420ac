"""The mutations of `make mutate`: they are applied, they are equal for equal seeds, and their tests exist."""

from __future__ import annotations

import ast
from types import FunctionType

import pytest

from ddp_cli.view.failures import sentence
from tests.mutation.mutations import mutate, mutations
from tests.mutation.nearest import MODULES, TESTS, choose, find_tests
from tests.mutation.running import Mutated
from tests.support import ROOT


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
        ("x = 256", "x = 512"),
        ("x = True", "x = False"),
        ("all(a)", "any(a)"),
        ("f(a, key=b)", "f(a)"),
        ("f(a)", "if False:\n f(a)"),
        ("x.y = a", "if False:\n x.y = a"),
        ("raise error", "if False:\n raise error"),
        ("x += y", "if False:\n x += y"),
    ],
)
def test_line_can_be_changed(source: str, mutated: str) -> None:
    result = range(len(list(mutations(ast.parse(source)))))
    assert ast.unparse(ast.parse(mutated)) in [ast.unparse(mutate(source, number)[0]) for number in result]


@pytest.mark.parametrize(
    "source",
    [
        "assert a == 1",
        "logger.info('x', y)",
        "if TYPE_CHECKING:\n    x = 1",
        "a: Literal[1]",
        "'text'",
        "open(encoding='x')",
        "zip(strict=True)",
        "time.monotonic() < patience",
    ],
)
def test_mutation_without_observable_effect_is_skipped(source: str) -> None:
    assert [
        mutation.what for mutation in mutations(ast.parse(source)) if not mutation.what.startswith("dropped: ")
    ] == []


def test_pause_is_not_mutated() -> None:
    assert list(mutations(ast.parse("time.sleep(1)\nasync def f():\n    await asyncio.sleep(2)"))) == []


def test_mutation_has_lines_that_must_run() -> None:
    source = "if (a ==\n        b):\n    c(1,\n      2)\nelse:\n    d()"
    assert {mutation.what: mutation.statement for mutation in mutations(ast.parse(source))} == {
        "Eq → NotEq": range(1, 3),
        "dropped: c(1, 2)": range(3, 5),
        "1 → 2": range(3, 5),
        "2 → 3": range(3, 5),
        "dropped: d()": range(6, 7),
    }


def test_functions_that_are_imported_get_mutated_code() -> None:
    module = "operator/ddp_cli/view/failures.py"
    assert isinstance(sentence, FunctionType)
    before = sentence.__code__
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    result = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "sentence")
    result.body = ast.parse("return 'mutated'").body
    try:
        Mutated(module, ast.fix_missing_locations(tree)).swap([sentence])
        assert sentence("as it was") == "mutated"
    finally:
        sentence.__code__ = before


def test_nearest_tests_run_first_within_time_limit() -> None:
    folder = "tests/unit/ddp_operator"
    running = {
        f"{folder}/test_why.py::a": 0.1,
        f"{folder}/decide/test_decide.py::slow": 2.0,
        f"{folder}/decide/test_decide.py::quick": 1.0,
        f"{folder}/decide/test_events.py::c": 0.1,
        f"{folder}/report/test_report.py::long": 2.0,
    }
    assert choose("operator/ddp_operator/decide/decide.py", running) == [
        f"{folder}/decide/test_decide.py::quick",
        f"{folder}/decide/test_decide.py::slow",
        f"{folder}/decide/test_events.py::c",
        f"{folder}/test_why.py::a",
    ]


def test_every_module_and_path_of_tables_exists() -> None:
    assert [pattern for pattern in MODULES if not list(ROOT.glob(pattern))] == []
    assert [path for package in TESTS for path in find_tests(package) if not (ROOT / path).exists()] == []
