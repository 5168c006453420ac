"""Create a job in a cluster: check it as `ddp render` does, then create the file's other objects, its code, the job."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from ddp_cli.client.api import FIELD_MANAGER, Api, Object, api_path, call_job, get_profile, list_jobs
from ddp_cli.client.code import own_code, stored_code
from ddp_cli.client.errors import ApiError, ClientError, NameInUse
from ddp_cli.client.workdir import Workdir, check_job
from ddp_operator.api import constants
from ddp_operator.api.errors import InvalidManifest

_APPLY: Final = "application/apply-patch+yaml"


def create_job(
    api: Api, text: str, workdir: Workdir | None, *, dry_run: bool, note: Callable[[str], None]
) -> tuple[Api, Object]:
    """Create the job of a YAML after the file's other objects. Returns the Api of its namespace, and the resource.

    ``note`` receives a line about each other object. Raises: ClientError.
    """

    def find_profile(kind: str, namespace: str, name: str) -> Object | None:
        own_api = api.within(namespace or None)
        return get_profile(own_api, kind, own_api.namespace, name)

    try:
        manifest, code = check_job(text, workdir, in_cluster=True, note=note, profiles=find_profile)
    except InvalidManifest as error:
        raise ClientError(f"refused\n{error}") from None
    api = api.within(manifest.resource["metadata"].get("namespace"))
    list_jobs(api, api.namespace)  # check before anything is stored that the operator is installed, with access to it
    for item in manifest.others:
        note(_apply(api, item, dry_run=dry_run))
    name = manifest.resource["metadata"]["name"]
    try:
        with nullcontext("") if dry_run else stored_code(api, code, manifest.job) as placed:
            if placed:
                note(f"code: {placed}")
            created = call_job(api, "POST", name, _without_server_fields(manifest.written), dry_run=dry_run)
    except ApiError as error:
        if error.status != 409:
            raise
        message = (
            f'the job "{name}" already exists in namespace "{api.namespace}"; replace it with `ddp submit --replace`, '
            f"delete it with `ddp delete {name}{api.option}`, or choose another metadata.name"
        )
        raise NameInUse(message, name, api.namespace) from None
    if not dry_run:
        own_code(api, code, replace(manifest.job, uid=created["metadata"]["uid"]))
    return api, created


def _apply(api: Api, item: Mapping[str, Any], *, dry_run: bool) -> str:
    """Apply another object of the file (server-side apply); return a line for the user. Raises: ClientError."""
    kind = str(item.get("kind"))
    version = str(item.get("apiVersion"))
    name = str((item.get("metadata") or {}).get("name", ""))
    try:
        served = api.request("GET", f"/apis/{version}" if "/" in version else f"/api/{version}")["resources"]
    except ApiError as error:
        if error.status != 404:
            raise
        served = []
    resource = next((entry for entry in served if entry["kind"] == kind and "/" not in entry["name"]), None)
    if resource is None:
        raise ClientError(f"{kind} {name}: the cluster has no resource {kind} ({version}); remove it from the file")
    if not name:
        raise ClientError(f"{kind}: metadata.name is missing; set it, or remove the object from the file")
    namespace = {"namespace": api.namespace} if resource["namespaced"] else {}
    path = api_path(version, resource["name"], namespace.get("namespace"), name)
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
