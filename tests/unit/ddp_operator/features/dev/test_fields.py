"""``spec.dev``: its rules."""

from ddp_operator.features.dev import FEATURE
from tests.support.fields import check_fields, list_fixed

PATH = "spec.dev"


def test_rules() -> None:
    good = {PATH: ({}, {"holdSeconds": 60}, {"holdSeconds": 86_400})}
    check_fields(FEATURE, good, {f"{PATH}.holdSeconds": (59, 86_401, 0)})


def test_it_is_fixed_once_pod_has_run() -> None:
    assert list_fixed(FEATURE, PATH, {}, {"holdSeconds": 60}) == [True, True]
