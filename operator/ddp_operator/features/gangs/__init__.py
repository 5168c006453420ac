"""``spec.scheduling.gang``: a scheduler starts all pods of an attempt or none, by a PodGroup (ADR 0042)."""

from typing import Final

from ddp_operator.decide.hooks import Feature
from ddp_operator.features.gangs.fields import FIELDS
from ddp_operator.features.gangs.pod_groups import POSTING

FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="scaling.md", fields=FIELDS, posting=POSTING)
