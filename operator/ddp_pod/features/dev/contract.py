"""What `ddp rerun` and the process that holds a pod of `ddp dev` exchange: an order, then events, a JSON object a line.

The command starts ``launcher.py order`` in the container of pod 0, by pods/exec or as a process, and writes the order
and the archive to its input. The program passes both on to the holder, and prints its events.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

from ...contract import plan, records
from ...contract.failure_record import Failure
from ...contract.records import choice, number, text
from ...contract.report import PodReport
from ...contract.run_report import RUN_RESULTS

MOST_CODE_BYTES: Final = 64 << 20
"""Of an archive, compressed."""
ORDER_LIMIT: Final = 1 << 17
"""Bytes of an order without its archive."""
ORDERS: Final = ("run", "stop", "release", "follow", "list")
RUN_STARTS: Final = "run {} starts"
"""In the log of each pod, before the output of a run. Commands show what follows."""
RUN_ENDED: Final = "run {} has ended"
"""After the output of a run."""
RUN_LINE: Final = re.compile(r"\[launcher\] run (\d{1,9}) (starts|has ended)")
REPLACED: Final = "was replaced by another `ddp rerun`"
"""The message of the end of such a run."""
EVENTS: Final = ("received", "sent", "stopped", "started", "ended", "released", "refused", "former", "listed")


@dataclass(frozen=True)
class Order:
    """What the pods are to do.

    run: end the present run and start another; stop: end the present run; release: end the pods as the last run ended;
    follow: only report events; list: report the former runs. ``run``: the least number of the new run; ``arguments``:
    of the script, if ``replaces_arguments`` in place of the last run's; ``digest``: of the archive's tar, empty for the
    same code again; ``size``: bytes of the archive, which follows the line.
    """

    kind: str
    run: int = 0
    replaces_arguments: bool = False
    arguments: tuple[str, ...] = ()
    digest: str = ""
    size: int = 0


@dataclass(frozen=True)
class Event:
    """What has happened to an order. After ended, released, refused and listed no event follows.

    received: pod 0 has the archive; sent: all ``pods`` have it; stopped: the former run has ended everywhere; started:
    the ranks of ``run`` start; ended: with ``result``, and ``failure`` as root cause; refused: nothing has changed,
    ``message`` and ``remedy`` say why; former: ``report`` on a former run at its end. ``seconds``: since the order
    arrived.
    """

    kind: str = choice(EVENTS)
    run: int = number(default=0)
    pods: int = number(default=0)
    seconds: float = number(default=0.0)
    result: str = choice(RUN_RESULTS)
    failure: Failure | None = None
    message: str = text(2048)
    remedy: str = text(2048)
    report: PodReport | None = None


def encode_order(order: Order) -> bytes:
    """Return the order's line. Raises: ValueError, if it is too long."""
    line = json.dumps(plan.to_json(order)).encode() + b"\n"
    if len(line) > ORDER_LIMIT:
        raise ValueError(f"the arguments have more than {ORDER_LIMIT >> 10} KiB; put them in a file of the folder")
    return line


def decode_order(line: bytes) -> Order:
    """Read an order. Raises: ValueError."""
    order: Order = plan.from_json(Order, json.loads(line))
    if order.kind not in ORDERS or not 0 <= order.size <= MOST_CODE_BYTES:
        raise ValueError(f"no order, or an archive of more than {MOST_CODE_BYTES >> 20} MiB")
    return order


def encode_event(event: Event) -> bytes:
    """Return the event's line."""
    return json.dumps(records.to_json(event), allow_nan=False).encode() + b"\n"


def decode_event(line: bytes) -> Event:
    """Read an event; its kind is empty if the line has none. Raises: ValueError, if the line is no JSON."""
    return records.read_record(Event, json.loads(line))
