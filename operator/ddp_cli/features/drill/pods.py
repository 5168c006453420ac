"""The probe in the containers of a job's pods, by pods/exec."""

from collections.abc import Iterator
from importlib import resources

from ddp_cli.client.api import Api, open_exec
from ddp_cli.client.errors import ApiError
from ddp_cli.client.logs import LogPod


class RunEnded(Exception):
    """The job ended during the drill. ``phase``: its last phase."""

    def __init__(self, phase: str) -> None:
        super().__init__(phase)
        self.phase = phase


def build_probe_command(*words: str) -> list[str]:
    """Return the command line that runs the probe in a container."""
    source = resources.files(__package__).joinpath("probe.py").read_text(encoding="utf-8")
    return ["python3", "-c", source, *words]


def execute_in_pod(api: Api, pod: LogPod, command: list[str]) -> Iterator[str]:
    """Yield the lines that a command prints in a pod, until it or the pod ends. Raises: ApiError."""
    from websocket import WebSocketException

    try:
        socket = open_exec(api, pod.name, command, container=pod.container, stdin=False, stderr=True)
    except ApiError as error:
        if error.status in (401, 403):
            raise
        return  # the pod was deleted or is not ready yet
    try:
        while socket.is_open() or socket.peek_stdout():
            line = socket.readline_stdout(timeout=5)
            if line:
                yield line
    except WebSocketException:
        return
    finally:
        socket.close()
