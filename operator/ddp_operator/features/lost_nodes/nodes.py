"""What the API server knows of a suspected node: its boot, and whether anything is reported against it.

Once the boot is another one, the pods from before have ended, whatever the node's Lease shows. So they have if the node
is deleted, as the cloud's controller does with that of a deleted machine.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.features.lost_nodes.returns import DELETED
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call

_LONGEST_ID: Final = 128
_OWN_TAINTS: Final = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Kubernetes' own, such as unreachable, out-of-service, shutdown. Any other one decides by the pods' tolerations."""


class NodeReading(NamedTuple):
    """A node. ``boot``: its ID, or ``DELETED``; empty: unknown. ``is_ready``: Ready, and without a reported problem."""

    boot: str = ""
    is_ready: bool = False


class NodeReader:
    """Reads nodes from the API server."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def read(self, node: str) -> NodeReading:
        """Return what is known of a node."""
        try:
            raw = await call(self._client, "GET", "Node", None, node, refusable=True)
        except ObjectNotFound:
            return NodeReading(DELETED)
        except (Refused, ClusterError):
            return NodeReading()
        boot = ((raw.get("status") or {}).get("nodeInfo") or {}).get("bootID")
        if not isinstance(boot, str) or len(boot) > _LONGEST_ID:
            boot = ""
        return NodeReading(boot, is_ready(raw))


def is_ready(raw: Mapping[str, Any]) -> bool:
    """Return whether a node is Ready, and neither cordoned nor deleted, with no taint or condition that objects.

    A condition of a detector objects if it is True; one that is named as Ready is, such as ``NetworkingReady``, if it
    is False.
    """
    spec = raw.get("spec") or {}
    if spec.get("unschedulable") or "deletionTimestamp" in (raw.get("metadata") or {}):
        return False
    if any(str(taint.get("key")).startswith(_OWN_TAINTS) for taint in spec.get("taints") or ()):
        return False
    conditions = (raw.get("status") or {}).get("conditions") or ()
    states = {str(condition.get("type")): condition.get("status") for condition in conditions}
    objections = (state == ("False" if kind.endswith("Ready") else "True") for kind, state in states.items())
    return states.get("Ready") == "True" and not any(objections)
