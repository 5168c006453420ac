"""``spec.idle``: its bounds, and when it may change."""

from ddp_operator.features.usage import FEATURE
from tests.support.fields import check_fields, list_fixed


def test_minutes_have_bounds() -> None:
    good = {"spec.idle": ({"minutes": 1}, {"minutes": 30, "action": "Suspend"})}
    check_fields(FEATURE, good, {"spec.idle.minutes": (0, -1, 10**9)})


def test_running_job_may_change_it() -> None:
    assert list_fixed(FEATURE, "spec.idle", {"minutes": 5}, {"minutes": 6}) == [False, True]
