"""`ddp submit`: check a job as `ddp render` does, then create it with its code and other objects."""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.api.parse import parse_resource
from ddp_operator.cli.arguments import add_cluster_arguments, add_output_argument
from ddp_operator.cli.init import IMAGE, add_script, find_script, write_manifest
from ddp_operator.cli.io import CommandError, ExitCode, integer, read_file
from ddp_operator.cli.workdir import (
    add_workdir_arguments,
    check_workdir,
    default_workdir,
    place_script,
    read_workdir,
)
from ddp_operator.client.api import FIELD_MANAGER, Api, Object, api_path, call_job, connect, list_jobs
from ddp_operator.client.cluster import ClusterBackend
from ddp_operator.client.code import own_code, stored_code
from ddp_operator.client.errors import ApiError
from ddp_operator.client.job import Job

_APPLY: Final = "application/apply-patch+yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_script(parser, "the YAML with the DDPTrainingJob, - for standard input; or a training script, train.py")
    group = parser.add_argument_group("of a script", "What the YAML would say, as `ddp init` writes it.")
    group.add_argument("--nodes", type=integer(1), metavar="N", help="number of pods; default: 1")
    group.add_argument("--procs", type=integer(1), metavar="N", help="ranks in each pod; default: one for each GPU")
    group.add_argument("--gpus", type=integer(0), metavar="N", help="GPUs of each pod; default: 1")
    group.add_argument("--image", help=f"an image with Python and PyTorch; default: {IMAGE}")
    group.add_argument("--name", help="name of the job; default: that of the script")
    add_workdir_arguments(parser).add_argument(
        "--code-claim",
        metavar="NAME",
        help="put the packed folder on this claim, where it is too large for a ConfigMap",
    )
    parser.add_argument("--dry-run", action="store_true", help="let the API server check the job without storing it")
    parser.add_argument("-w", "--watch", action="store_true", help="then watch the job until it ends")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = (
        "Other objects in the file (ConfigMaps, Secrets, claims) are applied first. A script takes the current folder "
        "along, or its own where it is outside of that. Arguments after -- become those of the script."
    )


def run(arguments: argparse.Namespace) -> int:
    """Create the objects. With ``--watch`` the exit code is the job's."""
    from ddp_operator.validation import check_manifest

    if arguments.watch and arguments.output == "json":
        raise CommandError("--watch prints text; leave out --output json, or use `ddp watch -o json`")
    text, folder = _read_manifest(arguments)
    code = read_workdir(arguments, folder)
    manifest = check_manifest(text, code.spec if code else None)
    if code is not None:
        check_workdir(code, manifest.job, in_cluster=True)
        print(code.describe(), file=sys.stderr)
    api = connect(namespace=arguments.namespace, context=arguments.context, kubeconfig=arguments.kubeconfig)
    api.namespace = arguments.namespace or manifest.resource["metadata"].get("namespace") or api.namespace
    list_jobs(api, api.namespace)  # before anything is stored: is the operator installed, and have we access?
    for other in manifest.others:
        _apply(api, other, dry_run=arguments.dry_run)
    name = manifest.resource["metadata"]["name"]
    try:
        with nullcontext("") if arguments.dry_run else stored_code(api, code, manifest.job) as placed:
            if placed:
                print(f"code: {placed}", file=sys.stderr)
            created = call_job(api, "POST", name, _without_server_fields(manifest.resource), dry_run=arguments.dry_run)
    except ApiError as error:
        if error.status != 409:
            raise
        raise CommandError(
            f'the job "{name}" already exists in namespace "{api.namespace}"; '
            f"delete it with `ddp delete {name}{api.option}`, or choose another metadata.name",
            ExitCode.FAILED,
        ) from None
    if not arguments.dry_run:
        own_code(api, code, parse_resource(created))
    if arguments.output == "json":
        print(json.dumps(created, indent=2))
        return ExitCode.OK
    print(f'{name}: {"would be submitted" if arguments.dry_run else "submitted"} to namespace "{api.namespace}"')
    if arguments.dry_run:
        return ExitCode.OK
    if not arguments.watch:
        job = f"{name}{api.option}"
        print(f"next:  ddp watch {job}   ddp logs {job} -f   ddp why {job}", file=sys.stderr)
        return ExitCode.OK
    from ddp_operator.cli.watch import watch_one

    return watch_one(Job(ClusterBackend(api), name, created))


def _read_manifest(arguments: argparse.Namespace) -> tuple[str, Path | None]:
    """Return the YAML that is named, or one for the script that is with the folder that it takes along."""
    options = {name: getattr(arguments, name) for name in ("nodes", "procs", "gpus", "image")}
    given = {name: value for name, value in options.items() if value is not None}
    script = find_script(arguments.file, arguments.module)
    if script is None:
        of_script = [f"--{name}" for name in (*given, *(["name"] if arguments.name else []))]
        if of_script or arguments.extra:
            raise CommandError(f"{of_script[0] if of_script else '--'}: is for a script; write it in {arguments.file}")
        return read_file(arguments.file), None
    folder = arguments.workdir or default_workdir(script)
    script = replace(place_script(script, folder), name=arguments.name or script.name)
    return write_manifest(script, arguments.extra, **given), folder


def _apply(api: Api, item: Mapping[str, Any], *, dry_run: bool) -> None:
    """Apply another object of the file (server-side apply). Raises: CommandError."""
    kind, version = str(item.get("kind")), str(item.get("apiVersion"))
    name = str((item.get("metadata") or {}).get("name", ""))
    try:
        served = api.request("GET", f"/apis/{version}" if "/" in version else f"/api/{version}")["resources"]
    except ApiError as error:
        if error.status != 404:
            raise
        served = []
    found = next((entry for entry in served if entry["kind"] == kind and "/" not in entry["name"]), None)
    if found is None or not name:
        raise CommandError(f"the cluster does not know {kind} ({version}) {name!r} in this file; remove it")
    namespace = {"namespace": api.namespace} if found["namespaced"] else {}
    path = api_path(version, found["name"], namespace.get("namespace"), name)
    query = {"fieldManager": FIELD_MANAGER, "force": "false"} | ({"dryRun": "All"} if dry_run else {})
    try:
        api.request("PATCH", path, query, {**item, "metadata": {**item["metadata"], **namespace}}, _APPLY)
    except ApiError as error:
        raise CommandError(f"{kind} {name}: {error}", ExitCode.CLUSTER) from None
    print(f"{kind} {name}: {'would be applied' if dry_run else 'applied'}", file=sys.stderr)


def _without_server_fields(resource: Mapping[str, Any]) -> Object:
    kept = ("name", "labels", "annotations")
    metadata = {key: resource["metadata"][key] for key in kept if resource["metadata"].get(key)}
    return {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata, "spec": resource["spec"]}
