"""Requests to pods for what they know of their peers. A pod runs code of users: time and size are limited."""

import asyncio
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from ddp_operator.features.lost_nodes.evidence import Reach
from ddp_operator.kube.scrape import STATUS, read_response, send_request
from ddp_pod.contract.peers import PeerReport
from ddp_pod.contract.records import read_record

CONNECT_SECONDS: Final = 1.5
"""The kernel repeats a lost packet after one second."""
RESPONSE_SECONDS: Final = 3.0
_LIMIT: Final = 1 << 14


class Contact(NamedTuple):
    """The end of a request to a pod. ``report``: None if it has none, as a launcher of an older release."""

    reach: Reach
    report: PeerReport | None = None


async def fetch_peers(address: str, port: int, wait: int) -> Contact:
    """Return what a pod knows of its peers, after ``wait`` seconds at most: at once if one is silent."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return Contact("Refused")
    except (TimeoutError, OSError):
        return Contact("Silent")
    try:
        send_request(writer, address, f"/peers?wait={wait}")
        async with asyncio.timeout(wait + RESPONSE_SECONDS):
            response = await read_response(reader, _LIMIT)
    except TimeoutError:
        return Contact("Frozen")
    except OSError:
        return Contact("Refused")  # reset by the pod's machine
    finally:
        writer.close()
    return Contact("Answers", decode_report(response))


def decode_report(response: bytes) -> PeerReport | None:
    """Return the report in a response; None: it has none."""
    head, _, body = response.partition(b"\r\n\r\n")
    status = STATUS.match(head)
    if status is None or status[1] != b"200" or len(body) > _LIMIT:
        return None
    with suppress(msgspec.DecodeError, RecursionError):
        return read_record(PeerReport, msgspec.json.decode(body))
    return None
