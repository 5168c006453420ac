"""``recovery.drains``."""

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.written import parse_written
from ddp_operator.decide.hooks import build_schema
from ddp_operator.features.drains import FEATURE
from tests.support.builders import resource
from tests.support.fields import check_fields, list_fixed


def test_only_known_actions_are_accepted() -> None:
    check_fields(FEATURE, {"spec.recovery.drains": ("Move", "Report")}, {})
    with pytest.raises(InvalidManifest, match=r'^spec\.recovery\.drains: Unsupported value: "Stay".*"Move", "Report"$'):
        parse_written(resource(recovery={"drains": "Stay"}), build_schema((FEATURE,)))


def test_running_job_may_change_it() -> None:
    assert list_fixed(FEATURE, "spec.recovery.drains", "Move", "Report") == [False, True]
