"""Reading NCCL's log: lines from real machines, each with its published source."""

from __future__ import annotations

import pytest

from ddp_pod.features.preflight.nccl_log import CommunicatorNetwork, read_network

# NVIDIA/nccl-tests#185, NCCL 2.19.3; the channels are of NVIDIA/nccl#1412's form.
ROCE = """\
dgxh100-3:2152176:2152176 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
dgxh100-3:2152176:2152299 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB eth0:11.1.1.1<0>
dgxh100-3:2152176:2152299 [0] NCCL INFO Using network IB
dgxh100-3:2152176:2152299 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA
"""
# ROCm/rccl#419, RCCL of 2021.
INFINIBAND = """\
e05r3n09:926:926 [3] NCCL INFO NET/IB : Using [0]mlx5_3:1/IB [1]mlx5_2:1/IB [2]mlx5_1:1/IB ; OOB ib0:11.5.5.50<0>
e05r3n09:926:926 [3] NCCL INFO Using network IB
"""
# NVIDIA/nccl#1814, with the plugin of HPC-X.
HPCX = """\
hostname-test:987:987 [7] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB bond0:172.36.134.184<0>
hostname-test:987:1260 [7] NCCL INFO Channel 03/0 : 47[7] -> 39[7] [receive] via NET/IBext_v8/1
hostname-test:987:1260 [7] NCCL INFO Channel 05/0 : 47[7] -> 39[7] [receive] via NET/IBext_v8/1
"""
# NVIDIA/nccl#952, NCCL 2.18: eight A100 a node, and no device for NCCL.
FALLEN_BACK = """\
node-1:926:1151 [7] NCCL INFO NET/IB : No device found.
node-1:926:1151 [7] NCCL INFO NET/Socket : Using [0]ibp12s0:10.149.0.32<0>
node-1:926:1151 [7] NCCL INFO Using network Socket
node-1:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] via P2P/IPC/read
node-1:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
"""
# NVIDIA/nccl#1053.
SWITCHED_OFF = """\
axa:3048391:3048566 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
axa:3048391:3048566 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>
axa:3048391:3048566 [0] NCCL INFO Using network Socket
"""
# NVIDIA/nccl#1597, two p5 with aws-ofi-nccl.
EFA = """\
8h200-2:14630:14695 [1] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
8h200-2:14630:14695 [1] NCCL INFO Using network AWS Libfabric
8h200-2:14630:14695 [1] NCCL INFO Channel 05/0 : 0[0] -> 1[1] [receive] via NET/AWS Libfabric/1/GDRDMA
8h200-2:14630:14695 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [send] via NET/AWS Libfabric/1/GDRDMA
"""
# The names of aws-ofi-nccl 1.16; aws/aws-ofi-nccl#1020 has the warning, of an instance without the devices in the pod.
NO_EFA = """\
ip-172-31-3-90:19:37 [0] nccl_net_ofi_rdma_init:7978 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data available
ip-172-31-3-90:19:37 [0] NCCL INFO Initialized NET plugin Socket
ip-172-31-3-90:19:37 [0] NCCL INFO Assigned NET plugin Socket to comm
"""
# What an A3 Mega prints with GPUDirect-TCPXO.
FASTRAK = "a3:10:20 [0] NCCL INFO Using network FasTrak\n"
# NVIDIA/nccl#1358: two GPUs of one machine; no network at all.
ONE_MACHINE = """\
LIUCC13-AC-01:106:120 [0] NCCL INFO Using network Socket
LIUCC13-AC-01:106:121 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/direct pointer
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (ROCE, CommunicatorNetwork("RoCE", True, "NET/Plugin : No plugin found, using internal implementation")),
        (INFINIBAND, CommunicatorNetwork("IB", False)),
        (HPCX, CommunicatorNetwork("IB", False)),
        (FALLEN_BACK, CommunicatorNetwork("Socket", False, "NET/IB : No device found.")),
        (SWITCHED_OFF, CommunicatorNetwork("Socket", False, "NCCL_IB_DISABLE set by environment to 1.")),
        (EFA, CommunicatorNetwork("EFA", True)),
        (NO_EFA, CommunicatorNetwork("Socket", False, "NET/OFI OFI fi_getinfo() call failed: No data available")),
        (EFA.replace("Provider is efa", "Provider is tcp"), CommunicatorNetwork("Libfabric-tcp", True)),
        (EFA.replace("AWS Libfabric", "Libfabric"), CommunicatorNetwork("EFA", True)),
        (FASTRAK, CommunicatorNetwork("FasTrak", False)),
        (ONE_MACHINE, CommunicatorNetwork()),
        (ONE_MACHINE.replace("P2P/direct pointer", "P2P/MNNVL"), CommunicatorNetwork("NVLink", True)),
        ("", CommunicatorNetwork()),
    ],
)
def test_network_is_read_from_log(log: str, expected: CommunicatorNetwork) -> None:
    assert read_network(log) == expected


def test_gpudirect_needs_all_channels() -> None:
    assert not read_network(f"{ROCE}{ROCE.replace('/GDRDMA', '')}").direct


def test_one_socket_channel_decides() -> None:
    assert read_network(f"{ROCE}{FALLEN_BACK}").transport == "Socket"


def test_device_has_link_type_of_its_port() -> None:
    log = ROCE.replace("mlx5_11:1/RoCE", "mlx5_11:1/IB")
    assert read_network(log).transport == "IB"
    assert read_network(log.replace("NET/IB/1", "NET/IB/0")).transport == "RoCE"
