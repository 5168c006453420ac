"""The archive of a packed folder onto a claim, by a short pod that has the claim mounted."""

import time
from contextlib import suppress
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.client.api import Api, Object, api_path
from ddp_operator.client.errors import ApiError, ClientError
from ddp_operator.code.packed import Code
from ddp_operator.manifests.template import ResolvedTemplate

# A shell's, for the job's Python may need more of its pod than this one has.
_RECEIVE: Final = """
if [ -e "$1" ]; then echo kept; exit; fi
umask 022
mkdir -p "${1%/*}" && echo send && head -c "$2" > "$1.$$.tmp" &&
    [ "$(wc -c < "$1.$$.tmp")" -eq "$2" ] && mv "$1.$$.tmp" "$1" && echo stored
"""
_POD_SECONDS: Final = 600
"""The pod ends by itself after so long, also where this process was killed."""
_POLL_SECONDS: Final = 0.5
_PIECE: Final = 256 * 1024
_SILENCE_SECONDS: Final = 60
_NEVER_STARTS: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError")
# What a pod of the job says about where it may run and as whom.
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


def put_on_claim(api: Api, code: Code, template: ResolvedTemplate) -> str:
    """Put the archive where ``spec.code`` says. Returns what was done. Raises: ClientError."""
    pods = api_path("v1", "pods", api.namespace)
    name = api.request("POST", pods, None, build_pod(code, template))["metadata"]["name"]
    try:
        _wait_for(api, f"{pods}/{name}", code)
        return _send(api, name, code)
    finally:
        with suppress(ClientError):
            api.request("DELETE", f"{pods}/{name}", {"gracePeriodSeconds": "0"})


def build_pod(code: Code, template: ResolvedTemplate) -> Object:
    """Return the pod, on the image of the job and where that may run, without GPUs."""
    trainer = template.trainer
    container: dict[str, Any] = {
        "name": "code",
        "image": trainer["image"],
        "command": ["sleep", str(_POD_SECONDS)],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        | (trainer.get("securityContext") or {}),
        "volumeMounts": [{"name": constants.CODE_VOLUME, "mountPath": constants.CODE_MOUNT_PATH}],
    }
    container |= {key: trainer[key] for key in ("imagePullPolicy",) if key in trainer}
    pod = {key: template.pod[key] for key in _KEPT if template.pod.get(key)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"ddp-code-{code.archive.digest[:8]}-",
            "labels": {constants.LABEL_MANAGED_BY: constants.MANAGED_BY_CLI},
            "annotations": {"sidecar.istio.io/inject": "false"},
        },
        "spec": {
            **pod,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _POD_SECONDS,
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}} | pod.get("securityContext", {}),
            "containers": [container],
            "volumes": [
                {"name": constants.CODE_VOLUME, "persistentVolumeClaim": {"claimName": code.spec["claimName"]}}
            ],
        },
    }


def _wait_for(api: Api, path: str, code: Code) -> None:
    """Wait until the pod runs. Raises: ClientError where it does not, with what Kubernetes says of it."""
    deadline, said = time.monotonic() + _POD_SECONDS / 2, ""
    while time.monotonic() < deadline:
        status = api.request("GET", path).get("status") or {}
        if status.get("phase") == "Running":
            return
        # A container that waits or has ended says why.
        states = [state for one in status.get("containerStatuses") or () for state in one["state"].values()]
        unmet = [one for one in status.get("conditions") or () if one.get("status") == "False" and one.get("message")]
        said = next(
            (f": {one.get('reason')}: {one['message']}" for one in [*states, *unmet] if one.get("message")), said
        )
        if status.get("phase") in ("Failed", "Succeeded") or any(one.get("reason") in _NEVER_STARTS for one in states):
            break
        time.sleep(_POLL_SECONDS)
    raise ClientError(
        f"the pod that puts the code on the claim {code.spec['claimName']} does not run{said}; see the claim and "
        "spec.template's image"
    )


def _send(api: Api, pod: str, code: Code) -> str:
    """Send the archive to a shell in the pod. Raises: ClientError."""
    from kubernetes import client
    from kubernetes.stream import stream
    from websocket import WebSocketException

    path = f"{constants.CODE_MOUNT_PATH}/{code.spec['path']}"
    command = ["sh", "-c", _RECEIVE, "sh", path, str(len(code.archive.data))]
    # stream() replaces a method of its client while it runs, so it gets a client of its own.
    core = client.CoreV1Api(client.ApiClient(api.client.configuration))
    options = {"stdin": True, "stdout": True, "stderr": True, "tty": False, "binary": True, "_preload_content": False}
    try:
        socket = stream(core.connect_get_namespaced_pod_exec, pod, api.namespace, command=command, **options)
        try:
            said, errors, cut = _offer(socket, code.archive.data)
        finally:
            socket.close()
    except client.ApiException as error:
        raise ApiError(
            f"pods/exec in namespace {api.namespace}: {error.reason}; --code-claim needs it", error.status
        ) from None
    except (WebSocketException, OSError) as error:
        said, errors, cut = b"", "", str(error)
    if cut and not errors:
        raise ClientError(f"the connection to the pod that puts the code on the claim was cut ({cut}); try again")
    if b"kept\n" in said:
        return f"the claim {code.spec['claimName']} has it already"
    if b"stored\n" in said:
        return f"put on the claim {code.spec['claimName']}, as {code.spec['path']}"
    reason = errors.splitlines()[-1] if errors else "no answer"
    raise ClientError(f"the code cannot be written to the claim {code.spec['claimName']}: {reason}")


def _offer(socket: Any, data: bytes) -> tuple[bytes, str, str]:
    """Send data once the shell asks for it. Returns what it printed, its errors, and by what the connection was cut."""
    from websocket import WebSocketException

    said, cut = b"", ""

    def listen(*words: bytes) -> None:
        nonlocal said
        until = time.monotonic() + _SILENCE_SECONDS
        while socket.is_open() and not any(word in said for word in words) and time.monotonic() < until:
            socket.update(timeout=1)
            said += socket.read_stdout(timeout=0) or b""

    try:
        listen(b"send\n", b"kept\n")
        if b"send\n" in said:
            for begin in range(0, len(data), _PIECE):
                socket.write_stdin(data[begin : begin + _PIECE])
            listen(b"stored\n")
    except (WebSocketException, OSError) as error:
        cut = str(error)  # or the shell has ended early, and has said why
    return said, (socket.read_stderr(timeout=0) or b"").decode(errors="replace").strip(), cut
