"""What NCCL's own log says about the network that a communicator uses.

NCCL takes the best network that it finds and says so nowhere but in its log: without a device plugin, a library or a
right it falls back to TCP sockets, and training is merely slow. The lines are those of NCCL 2.4 to 2.28 (init.cc,
transport/net.cc, transport/net_ib.cc) and of the plugins aws-ofi-nccl, nccl-rdma-sharp-plugins and Google's FasTrak.
"""

import dataclasses
import re

SOCKET = "Socket"
"""NCCL's name of plain TCP."""
_CHANNEL = re.compile(r"(?:Channel|Ring) \d+(?:/\d+)? : .* via (?:COLL)?NET/([^/\n]+)/(\d+)([^\n]*)")
_OTHER_CHANNEL = re.compile(r"(?:Channel|Ring) \d+(?:/\d+)? : .* via (\S+)")
_CHOSEN = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$", re.MULTILINE)
_VERBS = re.compile(r"NET/IB\w* : Using (.*)")
_PORT = re.compile(r"\[(\d+)\][^\[\]:]*:\d+/(IB|RoCE)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w-]+)")
# Why another network was not taken, from the most telling on.
_REASONS = (
    re.compile(r"NCCL WARN (NET/[^\n]+)"),
    re.compile(r"NCCL INFO (NET/(?:IB|OFI)[^\n]*(?:No device found|[Ff]ailed)[^\n]*)"),
    re.compile(r"NCCL INFO (NCCL_(?:NET|IB_DISABLE|NET_PLUGIN|IBEXT_DISABLE) set by environment to [^\n]+)"),
    re.compile(r"NCCL INFO (NET/Plugin[^\n]*(?:No plugin found|cannot open shared object|[Cc]ould not find)[^\n]*)"),
)


@dataclasses.dataclass(frozen=True)
class CommunicatorNetwork:
    """What carries the data between pods. ``transport``: empty where the log tells of no network.

    ``direct``: whether NICs read and write GPU memory themselves (GPUDirect RDMA) on all channels. ``reason``: NCCL's
    line on why it took no other network; empty where it has none.
    """

    transport: str = ""
    direct: bool = False
    reason: str = ""


def read_network(log: str) -> CommunicatorNetwork:
    """Return what one rank's log of NCCL_DEBUG=INFO with the subsystems INIT, NET and ENV says.

    Channels that were connected are what counts; where there is none yet, the network that was chosen.
    """
    channels, others = _CHANNEL.findall(log), _OTHER_CHANNEL.findall(log)
    if channels:
        kinds = {_name(kind, log, device) for kind, device, _ in channels}
        # One channel by sockets is what all others wait for.
        transport = SOCKET if SOCKET in kinds else "+".join(sorted(kinds))
        direct = all("/GDRDMA" in rest for _, _, rest in channels)
    elif others:  # within the pod, but for NVLink from node to node
        direct = any(kind.startswith("P2P/MNNVL") for kind in others)
        transport = "NVLink" if direct else ""
    else:
        chosen = _CHOSEN.findall(log)
        transport, direct = _name(chosen[-1], log, "") if chosen else "", False
    found = next((match for pattern in _REASONS for match in [pattern.search(log)] if match), None)
    return CommunicatorNetwork(transport, direct, found[1].strip()[:300] if found else "")


def _name(kind: str, log: str, device: str) -> str:
    """Return the name of a transport: NCCL says IB for RoCE as well, and Libfabric whatever is behind it."""
    if kind.startswith("IB"):
        used = _VERBS.search(log)
        layers = dict(_PORT.findall(used[1])) if used else {}
        return str(layers.get(device) or next(iter(layers.values()), "IB"))
    if kind.endswith("Libfabric"):
        provider = _PROVIDER.search(log)
        return "EFA" if provider is None or provider[1] == "efa" else f"Libfabric-{provider[1]}"
    return kind
