"""The field of the feature."""

from ddp_operator.features.replicas import FEATURE
from tests.support.fields import check_fields


def test_field_belongs_to_feature() -> None:
    check_fields(FEATURE, {"spec.recovery.replicaMismatch": ["Report", "Restart"]}, {})
