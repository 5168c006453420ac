"""`ddp submit`: check a job's YAML as `ddp render` does, then create it and what came with it."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.cli.arguments import add_cluster_arguments, add_output_argument
from ddp_operator.cli.io import CommandError, ExitCode, read_file
from ddp_operator.client.api import FIELD_MANAGER, Api, Object, api_path, call_job, connect, list_jobs
from ddp_operator.client.cluster import ClusterBackend
from ddp_operator.client.errors import ApiError
from ddp_operator.client.job import Job

_APPLY: Final = "application/apply-patch+yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - reads standard input")
    parser.add_argument("--dry-run", action="store_true", help="let the API server check the job without storing it")
    parser.add_argument("-w", "--watch", action="store_true", help="then watch the job until it ends")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = "Other objects in the file (ConfigMaps, Secrets, claims) are applied first."


def run(arguments: argparse.Namespace) -> int:
    """Create the objects. With ``--watch`` the exit code is the job's."""
    from ddp_operator.validation import check_manifest

    if arguments.watch and arguments.output == "json":
        raise CommandError("--watch prints text; leave out --output json, or use `ddp watch -o json`")
    manifest = check_manifest(read_file(arguments.file))
    api = connect(namespace=arguments.namespace, context=arguments.context, kubeconfig=arguments.kubeconfig)
    api.namespace = arguments.namespace or manifest.resource["metadata"].get("namespace") or api.namespace
    list_jobs(api, api.namespace)  # before anything is stored: is the operator installed, and have we access?
    for other in manifest.others:
        _apply(api, other, dry_run=arguments.dry_run)
    name = manifest.resource["metadata"]["name"]
    try:
        created = call_job(api, "POST", name, _without_server_fields(manifest.resource), dry_run=arguments.dry_run)
    except ApiError as error:
        if error.status != 409:
            raise
        raise CommandError(
            f'the job "{name}" already exists in namespace "{api.namespace}"; '
            f"delete it with `ddp delete {name}{api.option}`, or choose another metadata.name",
            ExitCode.FAILED,
        ) from None
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
