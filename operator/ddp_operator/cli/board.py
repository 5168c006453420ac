"""`ddp board`: print a job's or run's links in trackers, and start TensorBoard on a run's event files."""

import argparse
import importlib.util
import json
import os
import shlex
import subprocess  # nosec B404
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ddp_operator.cli.arguments import add_cluster_arguments, add_local_arguments, open_client
from ddp_operator.cli.io import CommandError, ExitCode, integer
from ddp_operator.cli.report import prefers_local
from ddp_operator.client.runs import open_run
from ddp_operator.kubeobjects import find_trainer
from ddp_operator.view.terminal import print_text

_EVENTS: Final = "events.out.tfevents.*"
_PORT: Final = 6006  # TensorBoard's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a run on this machine (its folder, its name or its job's name) or a job; default: the newest run",
    )
    parser.add_argument(
        "--port", type=integer(1, 65535), default=_PORT, metavar="PORT", help=f"TensorBoard's port; default: {_PORT}"
    )
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)
    parser.epilog = "For a run, TensorBoard is started until Ctrl-C. For a job, the commands to start it are printed."


def run(arguments: argparse.Namespace) -> int:
    """Print the links, then start TensorBoard or print how to. Raises: CommandError."""
    local = prefers_local(arguments)
    job = open_client(arguments, local=local).get(arguments.name)
    tracking = job.resource["spec"].get("tracking") or {}
    store = (tracking.get("mlflow") or {}).get("trackingUri") or ""
    lines = list(job.links)
    if store and not store.startswith(("http://", "https://")):
        lines.append(f"mlflow ui --backend-store-uri {shlex.quote(store)}")
    if local:
        folder = find_events(open_run(arguments.name, arguments.runs_dir).path, job.resource)
        if folder is not None:
            return _start(folder, arguments.port, lines)
    elif "tensorboard" in tracking:
        lines += build_commands(job.resource, arguments.port)
    if not lines:
        raise CommandError(
            f"{job.name} has neither a link of a tracker nor TensorBoard event files; set spec.tracking "
            "(docs/tracking.md)",
            ExitCode.NOT_FOUND,
        )
    print_text("\n".join(lines))
    return ExitCode.OK


def find_events(run: Path, resource: Mapping[str, Any]) -> Path | None:
    """Return the folder that holds a run's event files, in its pods' volumes or its claims; None if there are none."""
    pod = resource["spec"]["template"]["spec"]
    claims = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in pod.get("volumes") or ()]
    claims.append((resource["spec"].get("checkpoint") or {}).get("claimName"))
    roots = [run / "pods", *(run.parent / "claims" / claim for claim in dict.fromkeys(filter(None, claims)))]
    folders = {str(file.parent) for root in roots for file in root.rglob(_EVENTS)}
    return Path(os.path.commonpath(folders)) if folders else None


def _start(folder: Path, port: int, lines: list[str]) -> int:
    """Run TensorBoard until Ctrl-C, or print how to install it. Raises: CommandError."""
    options = ["--logdir", str(folder), "--port", str(port)]
    if importlib.util.find_spec("tensorboard") is None:
        print_text("\n".join([*lines, f"pip install tensorboard; {shlex.join(['tensorboard', *options])}"]))
        return ExitCode.OK
    print_text("\n".join([*lines, f"TensorBoard on {folder}: http://localhost:{port} (Ctrl-C ends it)"]), flush=True)
    command = [sys.executable, "-m", "tensorboard.main", *options]
    last_line = ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            last_line = "".join(deque(process.stderr or (), maxlen=1)).strip()
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            code = ExitCode.OK
    if code:
        raise CommandError(f"TensorBoard failed: {last_line or f'exit code {code}'}; if the port is in use, set --port")
    return ExitCode.OK


def build_commands(resource: Mapping[str, Any], port: int) -> Iterator[str]:
    """Yield commands that run TensorBoard on the job's volume, in a temporary pod with the job's image.

    Raises: CommandError, if no volume that another pod can mount holds the folder.
    """
    spec = resource["spec"]
    metadata = resource["metadata"]
    path = spec["tracking"]["tensorboard"]["path"]
    pod = spec["template"]["spec"]
    trainer = find_trainer(spec["template"])
    mounts = {mount["mountPath"]: mount for mount in trainer.get("volumeMounts") or ()}
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or ()}
    checkpoint = spec.get("checkpoint") or {}
    if checkpoint.get("claimName"):
        mounts[checkpoint["path"]] = {"name": "checkpoint", "mountPath": checkpoint["path"]}
        claim = {"claimName": checkpoint["claimName"]}
        volumes["checkpoint"] = {"name": "checkpoint", "persistentVolumeClaim": claim}
    parents = (parent for parent in mounts if path == parent or path.startswith(f"{parent.rstrip('/')}/"))
    mount = mounts.get(max(parents, key=len, default=""))
    volume = volumes.get(mount["name"]) if mount is not None else None
    if mount is None or volume is None or "emptyDir" in volume:
        raise CommandError(
            f"spec.tracking.tensorboard.path: {path} is on no volume that outlives the pods; mount a claim there"
        )
    name = f"{metadata['name']}-board"
    namespace = f"-n {metadata.get('namespace', 'default')}"
    container = {
        "name": name,
        "image": trainer["image"],
        "command": ["python3", "-m", "tensorboard.main", "--logdir", path, "--port", str(_PORT)],
        "stdin": True,
        "tty": True,
        "volumeMounts": [{**mount, "readOnly": True}],
    }
    kept = {key: pod[key] for key in ("securityContext", "imagePullSecrets") if key in pod}
    overrides = json.dumps({"spec": {**kept, "containers": [container], "volumes": [volume]}})
    yield "To start TensorBoard in a temporary pod (Ctrl-C deletes it):"
    yield (
        f"  kubectl run {name} {namespace} --rm -it --restart=Never --image={shlex.quote(trainer['image'])} "
        f"--overrides={shlex.quote(overrides)}"
    )
    # A connection that the pod refuses ends the port-forward, so TensorBoard must listen first.
    yield f'After it prints "Press CTRL+C to quit", forward its port in another terminal, for http://localhost:{port}:'
    yield f"  kubectl port-forward {namespace} pod/{name} {port}:{_PORT}"
