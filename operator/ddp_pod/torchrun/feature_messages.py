"""Messages of torchrun's agent that the launcher's services handle, and the supervisor only passes on."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class PeersLost(NamedTuple):
    """Peers report that they lost a rank. The reply, None, follows once a service has recorded why, if it knows."""


class GroupFindings(NamedTuple):
    """Why the job's ranks do not train as one, as pod 0 publishes it; None: they do, or it is unknown."""

    facts: Mapping[str, Any] | None


class FeatureSummary(NamedTuple):
    """What pod 0 publishes for a feature of all pods (``RoundExchange.summary``)."""

    feature: str
    summary: Any
