"""Names that are written more than once, because their modules must not import each other, are equal everywhere."""

import itertools
import re
from types import ModuleType
from typing import Any

import pytest

from ddp_operator import constants, launcher
from ddp_trainer import contract

SHARED = re.compile(
    r"(ENV|EXIT|CATEGORY|METRIC|RUNTIME)_\w+|LAUNCHER_PHASES|DEFAULT_\w+_PORT|TERMINATION_MESSAGE_LIMIT"
)
MODULES = (constants, launcher, contract)


def shared(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if SHARED.fullmatch(name)}


PAIRS = [
    pytest.param(name, one, other, id=f"{name}-{one.__name__.split('.')[-1]}-{other.__name__.split('.')[-1]}")
    for one, other in itertools.combinations(MODULES, 2)
    for name in sorted(shared(one).keys() & shared(other).keys())
]


@pytest.mark.parametrize(("name", "one", "other"), PAIRS)
def test_name_that_occurs_twice_means_the_same(name: str, one: ModuleType, other: ModuleType) -> None:
    assert getattr(one, name) == getattr(other, name)


@pytest.mark.parametrize(
    ("one", "other", "prefix", "least"),
    [
        (constants, launcher, "ENV_", 10), (constants, launcher, "EXIT_", 7), (constants, launcher, "CATEGORY_", 8),
        (constants, launcher, "METRIC_", 2), (constants, contract, "ENV_", 5), (constants, contract, "EXIT_", 7),
        (constants, contract, "METRIC_", 12), (launcher, contract, "EXIT_", 7),
    ],
)  # fmt: skip
def test_enough_is_compared(one: ModuleType, other: ModuleType, prefix: str, least: int) -> None:
    common = shared(one).keys() & shared(other).keys()
    assert len([name for name in common if name.startswith(prefix)]) >= least


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.parametrize("prefix", ["ENV_", "EXIT_", "METRIC_"])
def test_no_value_has_two_names(module: ModuleType, prefix: str) -> None:
    values = [value for name, value in shared(module).items() if name.startswith(prefix)]
    assert len(values) == len(set(values))


def test_every_exit_code_and_category_of_the_launcher_is_known_to_the_operator() -> None:
    for prefix in ("EXIT_", "CATEGORY_"):
        known = {value for name, value in vars(constants).items() if name.startswith(prefix)}
        said = {value for name, value in vars(launcher).items() if name.startswith(prefix)}
        assert said <= known


def test_variables_of_the_contract_cannot_be_set_by_users() -> None:
    ours = {value for name, value in vars(constants).items() if name.startswith("ENV_")}
    # The number of threads is a default that the user may choose.
    assert ours - constants.RESERVED_ENV == {constants.ENV_OMP_NUM_THREADS}
    assert {value for name, value in vars(contract).items() if name.startswith("ENV_")} <= constants.RESERVED_ENV


def test_replaced_exit_codes_are_preemption_and_signals() -> None:
    assert constants.EXIT_PREEMPTED in constants.REPLACED_EXIT_CODES
    assert all(code > 128 for code in constants.REPLACED_EXIT_CODES if code != constants.EXIT_PREEMPTED)
