"""Names that are written twice, because operator and trainer must not import each other, are equal in both."""

import re
from types import ModuleType
from typing import Any

import pytest

from ddp_operator.api import constants
from ddp_pod.contract import series
from ddp_sdk import contract

SHARED = re.compile(r"(ENV|EXIT|CATEGORY|METRIC|RUNTIME)_\w+|DEFAULT_\w+_PORT")


def shared(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if SHARED.fullmatch(name)}


OPERATOR = shared(constants) | shared(series)
TRAINER = shared(contract)
COMMON = sorted(OPERATOR.keys() & TRAINER.keys())


@pytest.mark.parametrize("name", COMMON)
def test_name_that_occurs_twice_means_same(name: str) -> None:
    assert OPERATOR[name] == TRAINER[name]


@pytest.mark.parametrize(("prefix", "least"), [("ENV_", 5), ("EXIT_", 7), ("METRIC_", 12)])
def test_comparison_of_names_covers_both_sides(prefix: str, least: int) -> None:
    assert len([name for name in COMMON if name.startswith(prefix)]) >= least


@pytest.mark.parametrize("names", [OPERATOR, TRAINER], ids=["operator", "trainer"])
@pytest.mark.parametrize("prefix", ["ENV_", "EXIT_", "METRIC_"])
def test_no_value_has_two_names(names: dict[str, Any], prefix: str) -> None:
    values = [value for name, value in names.items() if name.startswith(prefix)]
    assert len(values) == len(set(values))


def test_variables_of_contract_cannot_be_set_by_users() -> None:
    ours = {value for name, value in vars(constants).items() if name.startswith("ENV_")}
    # The number of threads is a default that the user may choose.
    assert ours - constants.RESERVED_ENV == {constants.ENV_OMP_NUM_THREADS}
    assert {value for name, value in vars(contract).items() if name.startswith("ENV_")} <= constants.RESERVED_ENV
