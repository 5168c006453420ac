"""A job made in a cluster: checked as `ddp render` does, then its code and what came with it, then the job itself."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.client.api import FIELD_MANAGER, Api, Object, api_path, call_job, get_profile, list_jobs
from ddp_operator.client.code import own_code, stored_code
from ddp_operator.client.errors import ApiError, ClientError, Conflict
from ddp_operator.client.workdir import Workdir, check_job

_APPLY: Final = "application/apply-patch+yaml"


def create_job(
    api: Api, text: str, workdir: Workdir | None, *, dry_run: bool, note: Callable[[str], None]
) -> tuple[Api, Object]:
    """Create the job of a YAML, and the file's other objects before it. Returns its namespace's Api, and the resource.

    ``note`` is told, in a line each, what else was made. Raises: ClientError.
    """

    def find_profile(kind: str, namespace: str, name: str) -> Object | None:
        where = api.within(namespace or None)
        return get_profile(where, kind, where.namespace, name)

    try:
        manifest, code = check_job(text, workdir, in_cluster=True, note=note, profiles=find_profile)
    except InvalidManifest as error:
        raise ClientError(f"refused\n{error}") from None
    api = api.within(manifest.resource["metadata"].get("namespace"))
    list_jobs(api, api.namespace)  # before anything is stored: is the operator installed, and have we access?
    for other in manifest.others:
        note(_apply(api, other, dry_run=dry_run))
    name = manifest.resource["metadata"]["name"]
    try:
        with nullcontext("") if dry_run else stored_code(api, code, manifest.job) as placed:
            if placed:
                note(f"code: {placed}")
            created = call_job(api, "POST", name, _without_server_fields(manifest.written), dry_run=dry_run)
    except ApiError as error:
        if error.status != 409:
            raise
        raise Conflict(
            f'the job "{name}" already exists in namespace "{api.namespace}"; '
            f"delete it with `ddp delete {name}{api.option}`, or choose another metadata.name"
        ) from None
    if not dry_run:
        own_code(api, code, replace(manifest.job, uid=created["metadata"]["uid"]))
    return api, created


def _apply(api: Api, item: Mapping[str, Any], *, dry_run: bool) -> str:
    """Apply another object of the file (server-side apply); return what was done. Raises: ClientError."""
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
        raise ClientError(f"the cluster does not know {kind} ({version}) {name!r} in this file; remove it")
    namespace = {"namespace": api.namespace} if found["namespaced"] else {}
    path = api_path(version, found["name"], namespace.get("namespace"), name)
    query = {"fieldManager": FIELD_MANAGER, "force": "false"} | ({"dryRun": "All"} if dry_run else {})
    try:
        api.request("PATCH", path, query, {**item, "metadata": {**item["metadata"], **namespace}}, _APPLY)
    except ApiError as error:
        raise ApiError(f"{kind} {name}: {error}") from None
    return f"{kind} {name}: {'would be applied' if dry_run else 'applied'}"


def _without_server_fields(resource: Mapping[str, Any]) -> Object:
    kept = ("name", "labels", "annotations")
    metadata = {key: resource["metadata"][key] for key in kept if resource["metadata"].get(key)}
    return {"apiVersion": constants.API_VERSION, "kind": constants.KIND, "metadata": metadata, "spec": resource["spec"]}
