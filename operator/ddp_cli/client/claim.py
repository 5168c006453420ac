"""Store the archive of a packed folder on a claim, or read from one, through a temporary pod that mounts the claim."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from ddp_cli.client.api import Api, Object, api_path, open_exec
from ddp_cli.client.errors import ApiError, ClientError
from ddp_cli.client.packing.packed import PackedCode
from ddp_operator.api import code_paths, constants, other_kinds
from ddp_operator.manifests.children import raise_requests
from ddp_operator.manifests.small_pods import build_small_resources
from ddp_operator.manifests.template import ResolvedTemplate

# A shell script: the job's Python may need volumes or variables that this pod lacks.
_RECEIVE: Final = """
if [ -e "$1" ]; then echo kept; exit; fi
umask 022
mkdir -p "${1%/*}" && echo send && head -c "$2" > "$1.$$.tmp" &&
    [ "$(wc -c < "$1.$$.tmp")" -eq "$2" ] && mv "$1.$$.tmp" "$1" && echo stored
"""
_POD_SECONDS: Final = 600
"""The pod ends after this time, even if this process was killed."""
_POLL_SECONDS: Final = 0.5
_PIECE: Final = 256 * 1024
_SILENCE_SECONDS: Final = 60
_NOBODY: Final = {"runAsNonRoot": True, "runAsUser": 65534}
_NEVER_STARTS: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
# Fields of the job's pods that select nodes, users and the runtime.
_KEPT: Final = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "tolerations",
    "securityContext",
    "serviceAccountName",
    "runtimeClassName",
    "schedulerName",
)


def put_on_claim(api: Api, code: PackedCode, template: ResolvedTemplate) -> str:
    """Store the archive at the path of ``spec.code``. Returns a line for the user. Raises: ClientError."""
    pod = build_pod(code, template)
    raised = pod | {"spec": raise_requests(pod["spec"], template.pod, template.trainer)}
    with _running_pod(api, (pod, raised), code.claim, "Running") as name:
        return _send(api, name, code)


def run_on_claim(api: Api, claim: str, image: str, command: Sequence[str], limit: int) -> list[str]:
    """Return the lines that a command prints of a claim, at most ``limit`` characters. Raises: ClientError."""
    container = {
        "name": "read",
        "image": image,
        "command": list(command),
        "workingDir": code_paths.CODE_MOUNT_PATH,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, **_NOBODY},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    manifest = _build_claim_pod("ddp-history-", claim, container, {})
    with _running_pod(api, (manifest,), claim, "Succeeded") as name:
        return list(api.lines(api_path("v1", "pods", api.namespace, name, "log"), {"limitBytes": str(limit)}))


@contextmanager
def _running_pod(api: Api, manifests: Sequence[Object], claim: str, phase: str) -> Iterator[str]:
    """Yield the name of a pod that has reached a phase, and delete it afterwards. Raises: ClientError.

    ``manifests``: the pod, and others to create if a policy or a LimitRange refuses it.
    """
    pods = api_path("v1", "pods", api.namespace)
    for manifest in manifests:
        try:
            name = api.request("POST", pods, None, manifest)["metadata"]["name"]
            break
        except ApiError as error:
            if error.status != HTTPStatus.FORBIDDEN or manifest is manifests[-1]:
                raise
    try:
        _wait_for(api, f"{pods}/{name}", claim, phase)
        yield name
    finally:
        with suppress(ClientError):
            api.request("DELETE", f"{pods}/{name}", {"gracePeriodSeconds": "0"})


def build_pod(code: PackedCode, template: ResolvedTemplate) -> Object:
    """Return the pod: the job's image and node selection, without GPUs."""
    trainer = template.trainer
    container: dict[str, Any] = {
        "name": "code",
        "image": trainer["image"],
        "command": ["sleep", str(_POD_SECONDS)],
        "resources": build_small_resources(template.limits, {"cpu": "100m", "memory": "64Mi"}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        | (trainer.get("securityContext") or {}),
    }
    container |= {key: trainer[key] for key in ("imagePullPolicy",) if key in trainer}
    pod = {key: template.pod[key] for key in _KEPT if template.pod.get(key)}
    return _build_claim_pod(f"ddp-code-{code.archive.digest[:8]}-", code.claim, container, pod)


def _build_claim_pod(prefix: str, claim: str, container: Object, pod: Object) -> Object:
    """Return a temporary pod that mounts a claim. ``pod``: further fields of its spec."""
    container["volumeMounts"] = [{"name": constants.CODE_VOLUME, "mountPath": code_paths.CODE_MOUNT_PATH}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": prefix,
            "labels": {constants.LABEL_MANAGED_BY: other_kinds.MANAGED_BY_CLI},
            "annotations": dict(constants.MESH_PROXIES.values()),
        },
        "spec": {
            **pod,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _POD_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}} | pod.get("securityContext", {}),
            "containers": [container],
            "volumes": [{"name": constants.CODE_VOLUME, "persistentVolumeClaim": {"claimName": claim}}],
        },
    }


def _wait_for(api: Api, path: str, claim: str, phase: str) -> None:
    """Wait until the pod is in a phase. Raises: ClientError with the reason from the pod's status."""
    deadline = time.monotonic() + _POD_SECONDS / 2
    cause = ""
    while time.monotonic() < deadline:
        status = api.request("GET", path).get("status") or {}
        if status.get("phase") == phase:
            return
        states = [state for entry in status.get("containerStatuses") or () for state in entry["state"].values()]
        cause = _find_cause(states, status.get("conditions") or ()) or cause
        never_starts = any(state.get("reason") in _NEVER_STARTS for state in states)
        if status.get("phase") in ("Failed", "Succeeded") or never_starts:
            break
        time.sleep(_POLL_SECONDS)
    raise ClientError(f"the temporary pod for claim {claim} does not start{cause}; check the claim and the pod's image")


def _find_cause(states: Sequence[Object], conditions: Sequence[Object]) -> str:
    """Return the reason and message of a container's state or of a false condition; empty if there is none."""
    false = [condition for condition in conditions if condition.get("status") == "False"]
    for item in (*states, *false):
        if item.get("message"):
            return f": {item.get('reason')}: {item['message']}"
    return ""


def _send(api: Api, pod: str, code: PackedCode) -> str:
    """Send the archive to a shell in the pod. Raises: ClientError."""
    from websocket import WebSocketException

    path = f"{code_paths.CODE_MOUNT_PATH}/{code.path}"
    command = ["sh", "-c", _RECEIVE, "sh", path, str(len(code.archive.data))]
    try:
        socket = open_exec(api, pod, command, stdin=True, stderr=True, binary=True)
        try:
            transfer = _transfer(socket, code.archive.data)
        finally:
            socket.close()
    except (WebSocketException, OSError) as error:
        transfer = _Transfer(b"", "", str(error))

    claim = code.claim
    if transfer.connection_error and not transfer.errors:
        raise ClientError(
            f"lost the connection to the pod that writes to claim {claim} ({transfer.connection_error}); try again"
        )
    if b"kept\n" in transfer.output:
        return f"the claim {claim} has it already"
    if b"stored\n" in transfer.output:
        return f"stored on the claim {claim} as {code.path}"
    reason = transfer.errors.splitlines()[-1] if transfer.errors else "no response"
    raise ClientError(f"the code cannot be written to claim {claim}: {reason}")


class _Transfer(NamedTuple):
    """The output and errors of the shell that received the data, and the error that ended the connection early."""

    output: bytes
    errors: str
    connection_error: str


def _transfer(socket: Any, data: bytes) -> _Transfer:
    """Send data after the shell requests it."""
    from websocket import WebSocketException

    output = b""
    connection_error = ""

    def read_until(*lines: bytes) -> None:
        nonlocal output
        until = time.monotonic() + _SILENCE_SECONDS
        while socket.is_open() and not any(line in output for line in lines) and time.monotonic() < until:
            socket.update(timeout=1)
            output += socket.read_stdout(timeout=0) or b""

    try:
        read_until(b"send\n", b"kept\n")
        if b"send\n" in output:
            for start in range(0, len(data), _PIECE):
                socket.write_stdin(data[start : start + _PIECE])
            read_until(b"stored\n")
    except (WebSocketException, OSError) as error:
        connection_error = str(error)  # if the shell ended early, stderr has the reason
    errors = (socket.read_stderr(timeout=0) or b"").decode(errors="replace").strip()
    return _Transfer(output, errors, connection_error)
