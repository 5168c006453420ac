"""The age of the Lease that a kubelet renews for its node, by the clock of the API server.

``renewTime`` is by the node's clock, which may be wrong. The API server notes in ``managedFields`` when it has stored
the last change, and its own time in each response.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.api.kubeobjects import parse_time, utc_now
from ddp_operator.features.lost_nodes.evidence import LeaseAge
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call

NAMESPACE: Final = "kube-node-lease"
_RENEWALS: Final = 4.0  # in the duration of a Lease
_USUAL_DURATION: Final = 40.0
_LONGEST_DURATION: Final = 600.0
_NOT_ALLOWED: Final = (
    f"the operator may not read Leases in {NAMESPACE} (bind its account to the Role of the chart), so only "
    "recovery.forceDeleteAfterSeconds decides"
)


class LeaseReading(NamedTuple):
    """The age of a Lease; None: it is unknown, for the ``problem``."""

    age: LeaseAge | None
    problem: str = ""


class LeaseReader:
    """Reads the Leases of suspected nodes. One watch of all would deliver a hundred changes a second of 1,000 nodes."""

    def __init__(self, client: ApiClient, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._client = client
        self._clock = clock

    async def read(self, node: str) -> LeaseReading:
        """Return the age of a node's Lease."""
        try:
            raw = await call(self._client, "GET", "Lease", NAMESPACE, node, refusable=True)
        except Refused:
            return LeaseReading(None, _NOT_ALLOWED)
        except ObjectNotFound:
            return LeaseReading(None, f"node {node} has no Lease in {NAMESPACE}")
        except ClusterError as error:
            return LeaseReading(None, f"its Lease cannot be read: {error}"[:200])
        return measure_age(raw, self._client.server_time or self._clock())


def measure_age(raw: Mapping[str, Any], now: datetime) -> LeaseReading:
    """Return the age of a Lease at the time of the API server."""
    spec = raw.get("spec") or {}
    stored = [parse_time(entry.get("time")) for entry in (raw.get("metadata") or {}).get("managedFields") or ()]
    renewed = max((time for time in stored if time is not None), default=None) or parse_time(spec.get("renewTime"))
    if renewed is None:
        return LeaseReading(None, "its Lease was never renewed")
    duration = spec.get("leaseDurationSeconds")
    if not isinstance(duration, int) or not 0 < duration <= _LONGEST_DURATION:
        duration = _USUAL_DURATION
    return LeaseReading(LeaseAge(max(0.0, (now - renewed).total_seconds()), duration / _RENEWALS))
