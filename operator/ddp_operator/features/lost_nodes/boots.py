"""The boot of a suspected node: once it is another one, the pods from before have ended, whatever its Lease shows.

So they have if the node is deleted, as the cloud's controller does with that of a deleted machine.
"""

from typing import Final

from ddp_operator.api.cluster_errors import ClusterError, Refused
from ddp_operator.features.lost_nodes.returns import DELETED
from ddp_operator.kube.client import ApiClient, ObjectNotFound, call

_LONGEST_ID: Final = 128


class BootReader:
    """Reads which boot of a node its kubelet has reported."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def read(self, node: str) -> str:
        """Return the ID of a node's boot, or ``DELETED``; empty: it is unknown."""
        try:
            raw = await call(self._client, "GET", "Node", None, node, refusable=True)
        except ObjectNotFound:
            return DELETED
        except (Refused, ClusterError):
            return ""
        boot = ((raw.get("status") or {}).get("nodeInfo") or {}).get("bootID")
        return boot if isinstance(boot, str) and len(boot) <= _LONGEST_ID else ""
