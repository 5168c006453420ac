"""`ddp board`: open what trackers have of a job or a run: links, and TensorBoard on its folder."""

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
from ddp_operator.terminal import print_text

_EVENTS: Final = "events.out.tfevents.*"
_PORT: Final = 6006  # TensorBoard's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a run on this machine, by its folder, its name or its job's, the newest by default; else a job",
    )
    parser.add_argument(
        "--port", type=integer(1, 65535), default=_PORT, metavar="PORT", help=f"TensorBoard's; default: {_PORT}"
    )
    add_local_arguments(parser, named=False)
    add_cluster_arguments(parser)
    parser.epilog = "Of a run on this machine TensorBoard is started, until Ctrl-C; of a job its commands are printed."


def run(arguments: argparse.Namespace) -> int:
    """Print the links, then start TensorBoard or say how to. Raises: CommandError."""
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
            f"{job.name} has nothing to open: no tracker of spec.tracking has named a page, and there are no "
            "event files of TensorBoard; docs/tracking.md says how to get them",
            ExitCode.NOT_FOUND,
        )
    print_text("\n".join(lines))
    return ExitCode.OK


def find_events(run: Path, resource: Mapping[str, Any]) -> Path | None:
    """Return the folder of TensorBoard's event files of a run: in its pods' volumes, or in its claims."""
    pod = resource["spec"]["template"]["spec"]
    claims = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in pod.get("volumes") or ()]
    claims.append((resource["spec"].get("checkpoint") or {}).get("claimName"))
    places = [run / "pods", *(run.parent / "claims" / claim for claim in dict.fromkeys(filter(None, claims)))]
    found = {str(events.parent) for place in places for events in place.rglob(_EVENTS)}
    return Path(os.path.commonpath(found)) if found else None


def _start(folder: Path, port: int, lines: list[str]) -> int:
    words = ["--logdir", str(folder), "--port", str(port)]
    if importlib.util.find_spec("tensorboard") is None:
        print_text("\n".join([*lines, f"pip install tensorboard; {shlex.join(['tensorboard', *words])}"]))
        return ExitCode.OK
    print_text("\n".join([*lines, f"TensorBoard on {folder}: http://localhost:{port} (Ctrl-C ends it)"]), flush=True)
    # It says the same and more on standard error; only what goes wrong is of interest.
    words = [sys.executable, "-m", "tensorboard.main", *words]
    said = ""
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = "".join(deque(process.stderr or (), maxlen=1)).strip()
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            code = ExitCode.OK
    if code:
        raise CommandError(f"TensorBoard has ended: {said or f'exit code {code}'}; choose another --port?")
    return ExitCode.OK


def build_commands(resource: Mapping[str, Any], port: int) -> Iterator[str]:
    """Yield commands that run TensorBoard on the job's volume, in a short pod of the job's image.

    Raises: CommandError, where the folder is on no volume that another pod can mount.
    """
    spec, metadata = resource["spec"], resource["metadata"]
    path, pod, trainer = (
        spec["tracking"]["tensorboard"]["path"],
        spec["template"]["spec"],
        find_trainer(spec["template"]),
    )
    mounts = {mount["mountPath"]: mount for mount in trainer.get("volumeMounts") or ()}
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or ()}
    saved = spec.get("checkpoint") or {}
    if saved.get("claimName"):
        mounts[saved["path"]] = {"name": "checkpoint", "mountPath": saved["path"]}
        volumes["checkpoint"] = {"name": "checkpoint", "persistentVolumeClaim": {"claimName": saved["claimName"]}}
    inside = (place for place in mounts if path == place or path.startswith(f"{place.rstrip('/')}/"))
    mount = mounts.get(max(inside, key=len, default=""))
    volume = volumes.get(mount["name"]) if mount is not None else None
    if mount is None or volume is None or "emptyDir" in volume:
        raise CommandError(
            f"spec.tracking.tensorboard.path: {path} is on no volume that outlives the pods, so nothing "
            "is left to show; mount a claim there"
        )
    name, where = f"{metadata['name']}-board", f"-n {metadata.get('namespace', 'default')}"
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
    yield "TensorBoard, in a pod that goes with Ctrl-C:"
    yield (
        f"  kubectl run {name} {where} --rm -it --restart=Never --image={shlex.quote(trainer['image'])} "
        f"--overrides={shlex.quote(overrides)}"
    )
    # Too early, a browser would end the forwarding by a connection that is refused.
    yield f'and beside it, once that says "Press CTRL+C to quit", for http://localhost:{port}:'
    yield f"  kubectl port-forward {where} pod/{name} {port}:{_PORT}"
