"""Jobs in several clusters by MultiKueue (ADR 0049): the operators do the work of Kueue's integration for them."""

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from ddp_operator.api.cluster import Object
from ddp_operator.api.other_kinds import WORKLOAD_KIND
from ddp_operator.api.posting import Posting
from ddp_operator.decide.hooks import Feature, Service

if TYPE_CHECKING:  # of the operator's process, which `ddp run` does not have
    from ddp_operator.kube.services import ServiceContext


class MultiKueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of this feature."""

    multikueue_worker: Annotated[
        bool, Meta(description="whether MultiKueue copies jobs to this cluster: true or false")
    ] = False


def _start(context: "ServiceContext") -> Service:
    from ddp_operator.features.multikueue.service import MultiKueue

    settings = context.settings if isinstance(context.settings, MultiKueueSettings) else MultiKueueSettings()
    return MultiKueue(is_worker=settings.multikueue_worker)


def _explain_absence(workload: Object) -> str:
    version = workload["apiVersion"]
    return f"the cluster serves no Workloads of {version}; install Kueue 0.15 or later, or remove spec.managedBy"


FEATURE: Final = Feature(
    "multikueue",
    maturity="beta",
    page="kueue.md",
    posting=Posting(WORKLOAD_KIND, _explain_absence),
    settings=MultiKueueSettings,
    start=_start,
)
