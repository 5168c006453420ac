"""The field of the feature: its values, and when it may change."""

from ddp_operator.features.process_groups import FEATURE
from tests.support.fields import check_fields, list_fixed

PATH = "spec.processGroupPolicy"


def test_field_belongs_to_feature() -> None:
    check_fields(FEATURE, {PATH: ["Warn", "Fail", "Ignore"]}, {})


def test_policy_can_be_changed_until_job_has_ended() -> None:
    assert list_fixed(FEATURE, PATH, "Warn", "Ignore") == [False, True]
