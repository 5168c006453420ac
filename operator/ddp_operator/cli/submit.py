"""`ddp submit`: check a job's YAML as `ddp render` does, then create it and what came with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.cli.api import (
    FIELD_MANAGER,
    Api,
    ApiRefusal,
    Object,
    add_cluster_arguments,
    add_output_argument,
    connect,
    job_path,
    list_jobs,
    place,
    write,
)
from ddp_operator.cli.errors import CommandError, ExitCode
from ddp_operator.cli.io import read_file

_APPLY: Final = "application/apply-patch+yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with the DDPTrainingJob; - for standard input")
    parser.add_argument("--dry-run", action="store_true", help="let the API server check it and store nothing")
    parser.add_argument("-w", "--watch", action="store_true", help="then show its progress to its end")
    add_output_argument(parser)
    add_cluster_arguments(parser)
    parser.epilog = "Other objects of the file (ConfigMaps, Secrets, claims) are applied first."


def run(arguments: argparse.Namespace) -> int:
    """Create the objects. With ``--watch`` the exit code is the job's."""
    from ddp_operator.validation import check_manifest

    if arguments.watch and arguments.output == "json":
        raise CommandError("--watch prints lines for people; leave out --output json, or use `ddp watch -o json`")
    text = read_file(arguments.file)
    manifest = check_manifest(text).manifest
    api = connect(arguments)
    api.namespace = arguments.namespace or manifest.resource["metadata"].get("namespace") or api.namespace
    list_jobs(api, api.namespace)  # before anything is stored: does the cluster know the kind, and may we?
    for other in manifest.others:
        _apply(api, other, dry_run=arguments.dry_run)
    created = _create(api, manifest.resource, dry_run=arguments.dry_run)
    name = created["metadata"]["name"]
    if arguments.output == "json":
        print(json.dumps(created, indent=2))
        return ExitCode.OK
    done = "would be submitted" if arguments.dry_run else "submitted"
    print(f'{name}: {done} to namespace "{api.namespace}"')
    if arguments.dry_run:
        return ExitCode.OK
    if not arguments.watch:
        print(f"follow it with:  ddp watch {name}   ddp logs {name} -f   ddp why {name}", file=sys.stderr)
        return ExitCode.OK
    from ddp_operator.cli.watch import watch_one

    return watch_one(api, name)


def _create(api: Api, resource: Mapping[str, Any], *, dry_run: bool) -> Object:
    try:
        return write(api, "POST", job_path(api.namespace), _without_server_fields(resource), dry_run=dry_run)
    except ApiRefusal as refusal:
        name = resource["metadata"]["name"]
        if refusal.status == 409:
            raise CommandError(
                f'there is already a job "{name}" in namespace "{api.namespace}"; '
                f"`ddp delete {name}` removes it, or choose another metadata.name",
                ExitCode.FAILED,
            ) from None
        raise


def _apply(api: Api, other: Mapping[str, Any], *, dry_run: bool) -> None:
    """Apply an object of the file that is no job: created where it is missing, else brought to what the file says."""
    kind, version = str(other.get("kind")), str(other.get("apiVersion"))
    name = str((other.get("metadata") or {}).get("name", ""))
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    try:
        served = api.request("GET", root)["resources"]
    except ApiRefusal as refusal:
        if refusal.status != 404:
            raise
        served = []
    found = next((entry for entry in served if entry["kind"] == kind and "/" not in entry["name"]), None)
    if found is None or not name:
        raise CommandError(f"the file holds a {kind} ({version}) {name!r} that the cluster does not know; remove it")
    path = place(version, found["name"], api.namespace if found["namespaced"] else None, name)
    query = {"fieldManager": FIELD_MANAGER, "force": "false"} | ({"dryRun": "All"} if dry_run else {})
    body = {**other, "metadata": {**other["metadata"], **({"namespace": api.namespace} if found["namespaced"] else {})}}
    try:
        api.request("PATCH", path, query, body, _APPLY)
    except ApiRefusal as refusal:
        raise CommandError(f"{kind} {name}: {refusal}", ExitCode.CLUSTER) from None
    print(f"{kind} {name}: {'would be applied' if dry_run else 'applied'}", file=sys.stderr)


def _without_server_fields(resource: Mapping[str, Any]) -> Object:
    kept = ("name", "labels", "annotations")
    metadata = {key: resource["metadata"][key] for key in kept if resource["metadata"].get(key)}
    return {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata, "spec": resource["spec"]}
