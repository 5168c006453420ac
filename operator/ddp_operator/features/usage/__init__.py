"""The GPU-seconds of a job by purpose, and ``spec.idle``."""

from typing import Final

from ddp_operator.decide.hooks import Feature
from ddp_operator.features.usage.accounting import account
from ddp_operator.features.usage.idle import FIELDS, IDLE, review

FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="beta",
    page="effective-time.md",
    fields=FIELDS,
    conditions={IDLE: "False"},
    review=review,
    account=account,
)
