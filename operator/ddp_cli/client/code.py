"""Store a packed folder in the cluster before the job is created: in a ConfigMap or on a claim."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from ddp_cli.client.api import Api, Object, api_path
from ddp_cli.client.claim import put_on_claim
from ddp_cli.client.errors import ApiError, ClientError
from ddp_cli.client.packing.packed import CODE_PREFIX, PackedCode
from ddp_operator.api.code_source import CONFIG_MAP, split_source
from ddp_operator.api.job import DDPTrainingJob, owner_reference
from ddp_operator.manifests.template import resolve_template

_STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"


@contextmanager
def stored_code(api: Api, code: PackedCode | None, job: DDPTrainingJob) -> Iterator[str]:
    """Store the code of a job that is about to be created; yield a line for the user, empty for a ConfigMap.

    ``code``: the packed folder; None: the job has no code, or names an existing ConfigMap. If the job is refused, its
    new ConfigMap is deleted. Raises: ClientError.
    """
    name = _find_config_map(job)
    if code is not None and name is None:
        yield put_on_claim(api, code, resolve_template(job))
        return
    if name is None or code is None:
        if name is not None:
            _check_exists(api, name)
        yield ""
        return
    created = _create(api, code.build_config_map(api.namespace))
    try:
        yield ""
    except BaseException:
        if created is not None:
            # Keep it if another `ddp submit` has added its job as an owner meanwhile.
            version = {"preconditions": {"resourceVersion": created["metadata"]["resourceVersion"]}}
            with suppress(ClientError):
                api.request("DELETE", _path(api, name), body=version)
        raise


def own_code(api: Api, code: PackedCode | None, job: DDPTrainingJob) -> None:
    """Add a job as an owner of its code's ConfigMap, which is deleted with its last owner. Raises: ClientError."""
    name = _find_config_map(job)
    if name is None or not name.startswith(CODE_PREFIX):
        return  # no ConfigMap, or the user's own
    patch = {"metadata": {"ownerReferences": [owner_reference(job, controller=False)]}}
    try:
        api.request("PATCH", _path(api, name), None, patch, _STRATEGIC_PATCH)
    except ApiError as error:
        if error.status != 404 or code is None:
            raise
        # Its last owner was deleted since it was stored.
        config_map = code.build_config_map(api.namespace)
        config_map["metadata"] |= patch["metadata"]
        _create(api, config_map)


def _find_config_map(job: DDPTrainingJob) -> str | None:
    """Return the name of the ConfigMap with a job's code; None: it has no code, or has it elsewhere."""
    code = msgspec.to_builtins(job.spec).get("code") or {}
    source = split_source(code.get("source", ""))
    return source.name if source.kind == CONFIG_MAP else None


def _check_exists(api: Api, name: str) -> None:
    try:
        api.request("GET", _path(api, name))
    except ApiError as error:
        if error.status != 404:
            raise
        raise ClientError(
            f'spec.code.source: ConfigMap "{name}" does not exist in namespace "{api.namespace}": it is deleted '
            "with the last job that uses it; submit with --workdir DIR, which packs the folder again"
        ) from None


def _create(api: Api, config_map: Object) -> Object | None:
    """Create the ConfigMap; None: it already exists. Raises: ClientError."""
    try:
        return api.request("POST", _path(api), None, config_map)
    except ApiError as error:
        if error.status != 409:
            raise
    return None


def _path(api: Api, name: str = "") -> str:
    return api_path("v1", "configmaps", api.namespace, name)
