"""Give orders to the pods of `ddp dev`, through `launcher.py order` in pod 0: by pods/exec, or as a process."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any, Final, cast

from ddp_cli.client.api import Api, open_exec
from ddp_cli.client.cluster_backend import ClusterBackend
from ddp_cli.client.errors import ApiError, ClientError, Conflict
from ddp_cli.client.job import Job
from ddp_cli.client.local_pod import LocalPod, find_local_pod
from ddp_cli.client.logs import LogPod, list_running_pods
from ddp_operator.api.status import ENDED_PHASES, Status
from ddp_pod.features.dev.contract import Event, Order, decode_event, encode_order

_PIECE: Final = 256 * 1024
_RETRY_SECONDS: Final = 1.0
_TRIES: Final = 30
_LAST_EVENTS: Final = ("ended", "released", "refused", "listed")
_MOST_OUTPUT: Final = 1 << 20  # bytes of a line
_DENIED: Final = (401, 403)


class PodMissing(Conflict):
    """Pod 0 does not run."""


class OrderRefused(Conflict):
    """The pods have refused an order."""


def check_takes_orders(job: Job) -> Status:
    """Return the status of a job of `ddp dev` that has not ended. Raises: Conflict for another job; ClientError."""
    status = job.status
    job.require_pods_here()
    phase = status.phase or "Pending"
    name = job.backend.argument(job.name)
    if job.resource["spec"].get("dev") is None:
        problem = "is no job of `ddp dev`, so its pods end with their ranks; start it with `ddp dev`"
    elif phase in ENDED_PHASES:
        problem = f"has ended ({phase}); start it again with `ddp dev`"
    elif phase == "Suspended":
        problem = f"is suspended; resume it (ddp resume {name}), then try again"
    else:
        return status
    raise Conflict(f"{job.name} {problem}")


def send_order(
    job: Job,
    order: Order,
    data: bytes = b"",
    *,
    on_progress: Callable[[int], None] = lambda sent: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Send an order with its archive, and yield its events until the last. Raises: ClientError.

    A connection that breaks after the first event is opened again, to follow the run. ``on_progress`` receives the
    bytes sent.
    """
    is_accepted = order.kind == "follow"
    failures = 0
    while True:
        problem = "no response"
        try:
            if failures:
                check_takes_orders(job)
            for event in _exchange(_open_channel(job), order, data, on_progress):
                if event.kind == "refused" and is_accepted:
                    problem = event.message  # pod 0 was replaced just now
                    break
                is_accepted = True
                failures = 0
                yield event
                if event.kind in _LAST_EVENTS:
                    return
        except (OSError, PodMissing, ApiError) as error:
            if isinstance(error, ClientError) and not (is_accepted and getattr(error, "status", None) not in _DENIED):
                raise
            problem = str(error)
        if not is_accepted:
            raise ApiError(
                f"lost the connection to pod 0 of {job.name} before it confirmed the order ({problem}); "
                f"`ddp why {job.backend.argument(job.name)}` shows the present run; try again"
            )
        failures += 1
        if failures == _TRIES:
            raise ApiError(f"pod 0 of {job.name} cannot be reached ({problem}); its run may continue")
        sleep(_RETRY_SECONDS)
        order = Order("follow")
        data = b""


def _exchange(
    channel: "ExecChannel | ProcessChannel", order: Order, data: bytes, on_progress: Callable[[int], None]
) -> Iterator[Event]:
    """Write an order, and yield events until the channel ends. Raises: OSError."""
    try:
        with suppress(BrokenPipeError):  # the events have the reason
            channel.write(encode_order(order))
            for start in range(0, len(data), _PIECE):
                channel.write(data[start : start + _PIECE])
                on_progress(min(start + _PIECE, len(data)))
        rest = b""
        while (piece := channel.read()) and len(rest) < _MOST_OUTPUT:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                with suppress(ValueError):  # such as a line of the image's start-up files
                    yield decode_event(line)
    finally:
        channel.close()


def _open_channel(job: Job) -> "ExecChannel | ProcessChannel":
    """Start the program in pod 0. Raises: ClientError, OSError."""
    if not isinstance(job.backend, ClusterBackend):
        try:
            return ProcessChannel(find_local_pod(job.backend.folder(job.name), 0))
        except Conflict as error:
            raise PodMissing(str(error)) from None
    api = job.backend.api
    pods = list_running_pods(api, job.name)
    pod = next((pod for pod in reversed(pods) if pod.node == 0), None)
    if pod is None:
        raise PodMissing(f"pod 0 of {job.name} does not run; `ddp why {job.name}{api.option}` explains the reason")
    return ExecChannel(api, pod)


class ExecChannel:
    """The program in a pod of a cluster."""

    def __init__(self, api: Api, pod: LogPod) -> None:
        """Start it. Raises: ApiError."""
        command = [*pod.launcher, "order"]
        self._socket = open_exec(api, pod.name, command, container=pod.container, stdin=True, stderr=True, binary=True)

    def write(self, data: bytes) -> None:
        """Write to its input. Raises: OSError."""
        self._call(lambda: self._socket.write_stdin(data))

    def read(self) -> bytes:
        """Return output; none at its end. Raises: OSError."""
        while self._socket.is_open():
            self._call(lambda: self._socket.update(timeout=1))
            data: bytes = self._socket.read_stdout(timeout=0)
            if data:
                return data
        return self._socket.read_stdout(timeout=0) or b""

    def _call(self, function: Callable[[], Any]) -> None:
        from websocket import WebSocketException

        try:
            function()
        except WebSocketException as error:
            raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        with suppress(Exception):  # it may be broken
            self._socket.close()


class ProcessChannel:
    """The program beside a pod on this machine. Ctrl-C in the terminal does not reach it."""

    def __init__(self, pod: LocalPod) -> None:
        """Start it. Raises: OSError."""
        self._process = subprocess.Popen(
            [*pod.launcher, "order"],
            env=pod.environment,
            cwd=pod.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._input = cast(IO[bytes], self._process.stdin)
        self._output = cast(IO[bytes], self._process.stdout)

    def write(self, data: bytes) -> None:
        """Write to its input. Raises: OSError."""
        self._input.write(data)
        self._input.flush()

    def read(self) -> bytes:
        """Return output; none at its end. Raises: OSError."""
        return os.read(self._output.fileno(), _PIECE)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with suppress(OSError):
            self._process.communicate()
