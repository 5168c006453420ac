"""Read from NCCL's log which network a communicator uses.

NCCL selects the fastest network that works and reports it only in its log. Without a device plugin, a library or a
permission it falls back to TCP sockets, and training is merely slow. The patterns match NCCL 2.4 to 2.28 (init.cc,
transport/net.cc, transport/net_ib.cc) and the plugins aws-ofi-nccl, nccl-rdma-sharp-plugins and Google's FasTrak.
"""

import dataclasses
import re

SOCKET = "Socket"
"""NCCL's name of plain TCP."""
_CHANNEL = re.compile(r"(?:Channel|Ring) \d+(?:/\d+)? : .* via (?:COLL)?NET/([^/\n]+)/(\d+)([^\n]*)")
_LOCAL_CHANNEL = re.compile(r"(?:Channel|Ring) \d+(?:/\d+)? : .* via (\S+)")
_SELECTED = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$", re.MULTILINE)
_VERBS = re.compile(r"NET/IB\w* : Using (.*)")
_PORT = re.compile(r"\[(\d+)\][^\[\]:]*:\d+/(IB|RoCE)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w-]+)")
# Why NCCL did not select a faster network, the most specific line first.
_FALLBACK_REASONS = (
    re.compile(r"NCCL WARN (NET/[^\n]+)"),
    re.compile(r"NCCL INFO (NET/(?:IB|OFI)[^\n]*(?:No device found|[Ff]ailed)[^\n]*)"),
    re.compile(r"NCCL INFO (NCCL_(?:NET|IB_DISABLE|NET_PLUGIN|IBEXT_DISABLE) set by environment to [^\n]+)"),
    re.compile(r"NCCL INFO (NET/Plugin[^\n]*(?:No plugin found|cannot open shared object|[Cc]ould not find)[^\n]*)"),
)
_REASON_LIMIT = 300  # characters


@dataclasses.dataclass(frozen=True)
class CommunicatorNetwork:
    """The network between pods. ``transport``: empty if the log names none.

    ``direct``: whether NICs read and write GPU memory (GPUDirect RDMA) on all channels. ``reason``: the line in which
    NCCL explains why it selected no faster network; empty if there is none.
    """

    transport: str = ""
    direct: bool = False
    reason: str = ""


def read_network(log: str) -> CommunicatorNetwork:
    """Return the network from one rank's log of NCCL_DEBUG=INFO with the subsystems INIT, NET and ENV.

    Connected channels are decisive; before any is connected, the selected network counts.
    """
    network_channels = _CHANNEL.findall(log)
    local_channels = _LOCAL_CHANNEL.findall(log)
    selected = _SELECTED.findall(log)
    transport = ""
    direct = False
    if network_channels:
        kinds = {_name_transport(kind, log, device) for kind, device, _ in network_channels}
        # Every collective waits for its slowest channel.
        transport = SOCKET if SOCKET in kinds else "+".join(sorted(kinds))
        direct = all("/GDRDMA" in rest for _, _, rest in network_channels)
    elif local_channels:  # within the pod, except for NVLink between nodes
        direct = any(kind.startswith("P2P/MNNVL") for kind in local_channels)
        transport = "NVLink" if direct else ""
    elif selected:
        transport = _name_transport(selected[-1], log, "")
    return CommunicatorNetwork(transport, direct, _find_fallback_reason(log))


def _find_fallback_reason(log: str) -> str:
    for pattern in _FALLBACK_REASONS:
        match = pattern.search(log)
        if match:
            return match[1].strip()[:_REASON_LIMIT]
    return ""


def _name_transport(kind: str, log: str, device: str) -> str:
    """Return the name of a transport. NCCL reports RoCE as IB, and every libfabric provider as Libfabric."""
    if kind.startswith("IB"):
        verbs = _VERBS.search(log)
        layers = dict(_PORT.findall(verbs[1])) if verbs else {}
        return str(layers.get(device) or next(iter(layers.values()), "IB"))
    if kind.endswith("Libfabric"):
        provider = _PROVIDER.search(log)
        return "EFA" if provider is None or provider[1] == "efa" else f"Libfabric-{provider[1]}"
    return kind
