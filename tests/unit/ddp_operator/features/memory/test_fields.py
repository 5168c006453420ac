"""The fields of the feature: their values."""

from ddp_operator.features.memory import FEATURE
from tests.support.fields import check_fields


def test_fields_belong_to_feature() -> None:
    path = "spec.checkpoint.memoryInterval"
    check_fields(FEATURE, {path: [0, 1_000_000]}, {path: [-1, 1_000_001]})
