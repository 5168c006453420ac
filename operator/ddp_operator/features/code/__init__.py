"""``spec.code``: the folder that `ddp submit --workdir` packs, unpacked in each pod (ADR 0026)."""

from typing import Final

from ddp_operator.decide.hooks import Feature
from ddp_operator.features.code.fields import FIELDS

FEATURE: Final = Feature(FIELDS.feature, maturity="stable", page="your-code.md", fields=FIELDS)
