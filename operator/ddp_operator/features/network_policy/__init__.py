"""``spec.networkPolicy``: a NetworkPolicy limits the connections of a job's pods."""

from typing import Final

from ddp_operator.decide.hooks import Feature
from ddp_operator.features.network_policy.fields import FIELDS

FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="security.md", fields=FIELDS)
