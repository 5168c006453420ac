"""A packed folder in the cluster: its ConfigMap, made before the job and owned by it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from ddp_operator.client.api import Api, Object, api_path
from ddp_operator.client.errors import ApiError, ClientError
from ddp_operator.code.packed import Code

_STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"


@contextmanager
def stored_code(api: Api, code: Code) -> Iterator[None]:
    """Have the ConfigMap with the code there; it is taken away again where what follows fails. Raises: ClientError."""
    created = _create(api, code.build_config_map(api.namespace))
    try:
        yield
    except BaseException:
        if created is not None:
            # Not where another `ddp submit` has made its job an owner meanwhile.
            version = {"preconditions": {"resourceVersion": created["metadata"]["resourceVersion"]}}
            with suppress(ClientError):
                api.request("DELETE", _path(api, created["metadata"]["name"]), body=version)
        raise


def own_code(api: Api, code: Code, owner: Mapping[str, Any]) -> None:
    """Make a job an owner of its ConfigMap, which goes with the last one. Raises: ClientError."""
    name = code.spec["configMapName"]
    patch = {"metadata": {"ownerReferences": [dict(owner)]}}
    try:
        api.request("PATCH", _path(api, name), None, patch, _STRATEGIC_PATCH)
    except ApiError as error:
        if error.status != 404:
            raise
        # Its last owner was deleted just now, and took it along.
        config_map = code.build_config_map(api.namespace)
        config_map["metadata"] |= patch["metadata"]
        _create(api, config_map)


def _create(api: Api, config_map: Object) -> Object | None:
    """Create the ConfigMap; None: it is there already. Raises: ClientError."""
    try:
        return api.request("POST", _path(api), None, config_map)
    except ApiError as error:
        if error.status != 409:
            raise
    return None


def _path(api: Api, name: str = "") -> str:
    return api_path("v1", "configmaps", api.namespace, name)
