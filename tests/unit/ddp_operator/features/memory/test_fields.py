"""The fields of the feature: their values."""

from ddp_operator.features.memory import FEATURE
from tests.support.fields import check_fields


def test_fields_belong_to_feature() -> None:
    path = "spec.checkpoint.memory.interval"
    check_fields(FEATURE, {path: [1, 1_000_000], "spec.checkpoint.memory.enabled": [True]}, {path: [0, 1_000_001]})
