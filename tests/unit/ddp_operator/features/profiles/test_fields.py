"""``spec.profileRef``: its rules."""

from ddp_operator.features.profiles import FEATURE
from tests.support.fields import check_fields, list_fixed

PATH = "spec.profileRef"


def test_rules() -> None:
    bad = {f"{PATH}.name": ("", "-a", "A", "a_b", "a" * 254)}
    check_fields(FEATURE, {PATH: ({"name": "gpu"}, {"kind": "DDPTrainingProfile", "name": "a.b"})}, bad)


def test_it_is_fixed_once_job_has_started() -> None:
    assert list_fixed(FEATURE, PATH, {"name": "gpu"}, {"name": "other"}) == [True, True]
