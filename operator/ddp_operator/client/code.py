"""A packed folder in the cluster: its ConfigMap, made before the job and owned by it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ddp_operator import names
from ddp_operator.api.job import DDPTrainingJob, owner_reference
from ddp_operator.client.api import Api, Object, api_path
from ddp_operator.client.claim import put_on_claim
from ddp_operator.client.errors import ApiError, ClientError
from ddp_operator.code.packed import Code
from ddp_operator.manifests.template import resolve_template

_STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"


@contextmanager
def stored_code(api: Api, code: Code | None, job: DDPTrainingJob) -> Iterator[str]:
    """Have the code of a job that is created now where its spec says; yields what was done for that.

    ``code``: what was packed for it; None: it names a ConfigMap that is there, or no code. The ConfigMap of a job that
    is refused is taken away again. Raises: ClientError.
    """
    name = job.spec.code.config_map_name if job.spec.code else None
    if code is not None and code.image is not None:
        from ddp_operator.client.registry import push_image  # with an HTTP client, for this one case

        _check_image_volumes(api, code.image.reference)
        yield push_image(code.image)
        return
    if code is not None and name is None:
        yield put_on_claim(api, code, resolve_template(job))
        return
    if name is None or code is None:
        if name is not None:
            _check_there(api, name)
        yield ""
        return
    created = _create(api, code.build_config_map(api.namespace))
    try:
        yield ""
    except BaseException:
        if created is not None:
            # Not where another `ddp submit` has made its job an owner meanwhile.
            version = {"preconditions": {"resourceVersion": created["metadata"]["resourceVersion"]}}
            with suppress(ClientError):
                api.request("DELETE", _path(api, name), body=version)
        raise


def own_code(api: Api, code: Code | None, job: DDPTrainingJob) -> None:
    """Make a job an owner of the ConfigMap with its code, which goes with the last one. Raises: ClientError."""
    name = job.spec.code.config_map_name if job.spec.code else None
    if name is None or not name.startswith(names.CODE_PREFIX):
        return  # none, or somebody's own
    patch = {"metadata": {"ownerReferences": [owner_reference(job, controller=False)]}}
    try:
        api.request("PATCH", _path(api, name), None, patch, _STRATEGIC_PATCH)
    except ApiError as error:
        if error.status != 404 or code is None:
            raise
        # Its last owner was deleted just now, and took it along.
        config_map = code.build_config_map(api.namespace)
        config_map["metadata"] |= patch["metadata"]
        _create(api, config_map)


def _check_image_volumes(api: Api, reference: str) -> None:
    """See whether the API server takes them: it drops what it does not know, or what is switched off."""
    container = {"name": "code", "image": reference, "volumeMounts": [{"name": "code", "mountPath": "/code"}]}
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "ddp-code-"},
        "spec": {"containers": [container], "volumes": [{"name": "code", "image": {"reference": reference}}]},
    }
    try:
        made = api.request("POST", api_path("v1", "pods", api.namespace), {"dryRun": "All"}, pod)
    except ApiError as error:
        if error.status is None:
            raise
        return  # no right to make pods, or a policy about them: the job's own pods will show it
    if not any("image" in volume for volume in made["spec"].get("volumes") or ()):
        raise ClientError(
            "--code-image: the cluster has no image volumes: they need Kubernetes 1.35, or 1.31 with the feature gate "
            "ImageVolume; put the code on a claim that all pods can mount: --code-claim NAME"
        )


def _check_there(api: Api, name: str) -> None:
    try:
        api.request("GET", _path(api, name))
    except ApiError as error:
        if error.status != 404:
            raise
        raise ClientError(
            f'spec.code.configMapName: there is no ConfigMap "{name}" in namespace "{api.namespace}": it went with the '
            "last job that had it; submit with --workdir DIR, which packs the folder again"
        ) from None


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
