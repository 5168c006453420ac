"""``spec.history``: a Job without GPUs stores the record of an ended job before that may be deleted (ADR 0053)."""

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from ddp_operator.decide.hooks import Feature, Service
from ddp_operator.features.history.fields import FIELDS
from ddp_operator.features.history.review import HISTORY_STORED, review

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.kube.services import ServiceContext


class HistorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this feature."""

    history_image: Annotated[
        str, Meta(description="image with Python that stores records of jobs of which no pod has run; unset: the job's")
    ] = ""


def _start(context: "ServiceContext") -> Service:
    from ddp_operator.features.history.service import HistoryStore

    settings = context.settings if isinstance(context.settings, HistorySettings) else HistorySettings()
    return HistoryStore(settings.history_image)


FEATURE: Final = Feature(
    FIELDS.feature,
    maturity="beta",
    page="monitoring.md",
    fields=FIELDS,
    conditions={HISTORY_STORED: "True"},
    review=review,
    settings=HistorySettings,
    start=_start,
)
