"""Call an API server: plain JSON over the official client's login and connections."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from ddp_cli.client.errors import ApiError, ClientError, NotFound
from ddp_cli.view.why import LeaseRenewal
from ddp_operator.api import constants, other_kinds
from ddp_operator.api.child_names import is_attempt_name
from ddp_operator.api.kubeobjects import parse_time
from ddp_operator.api.nesting import limit_nesting
from ddp_operator.decide.hooks import feature_job_name
from ddp_operator.features import FEATURES
from ddp_operator.reading.events import read_event_time

Object = dict[str, Any]

FIELD_MANAGER: Final = "ddp"
MERGE_PATCH: Final = "application/merge-patch+json"
_TIMEOUT_SECONDS: Final = 30.0
_CHUNK: Final = 1 << 16
_IN_CLUSTER_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Api:
    """One API server, and the namespace of the calls."""

    def __init__(self, client: Any, namespace: str, home: str = "", *, chosen: bool = True) -> None:
        self.client = client
        self.namespace = namespace
        self.home = home
        self._chosen = chosen  # the user named the namespace; it is not the context's
        self.host = client.configuration.host.rstrip("/")

    @property
    def option(self) -> str:
        """The -n option of a suggested command; empty for the namespace of the context."""
        return "" if self.namespace == self.home else f" -n {self.namespace}"

    def within(self, namespace: str | None) -> "Api":
        """Return an Api for the namespace of a file, unless the user named another."""
        if self._chosen or not namespace:
            return self
        return Api(self.client, namespace, self.home, chosen=False)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        """Make one call and return its JSON. Raises: ClientError."""
        response = self._send(method, path, query, body, content_type, _TIMEOUT_SECONDS)
        try:
            return dict(json.loads(limit_nesting(response.data)))
        except ValueError:
            raise ApiError(
                f"{self.host}{path}: the response is not JSON; check that the server is a Kubernetes API server"
            ) from None

    def lines(
        self, path: str, query: Mapping[str, str] | None = None, *, timeout: float = _TIMEOUT_SECONDS
    ) -> Iterator[str]:
        """Yield the lines of a streamed response until ``timeout`` seconds of silence. Raises: ClientError."""
        response = self._send("GET", path, query, None, "", timeout)
        try:
            for line in response:
                yield line.decode("utf-8", "replace").removesuffix("\n")
        except _connection_errors() as error:
            raise self._unreachable(error) from None
        finally:
            response.close()

    def read(self, path: str, limit: int, seconds: float) -> bytes:
        """Return a response of a pod, which may be hostile: its size and its whole time are bounded.

        Raises: ClientError.
        """
        deadline = time.monotonic() + seconds
        response = self._send("GET", path, None, None, "", seconds)
        data = b""
        try:
            while chunk := response.read1(_CHUNK):
                data += chunk
                if len(data) > limit or time.monotonic() > deadline:
                    raise ApiError(f"{self.host}{path}: the response exceeds {limit:,} bytes or {seconds:.0f} seconds")
        except _connection_errors() as error:
            raise self._unreachable(error) from None
        finally:
            response.close()
        return data

    def build_headers(self) -> dict[str, str]:
        """Return the headers of each call, with the login."""
        headers = {"Accept": "application/json", "User-Agent": "ddp"} | dict(self.client.default_headers)
        for scheme in self.client.configuration.auth_settings().values():
            if scheme.get("in") == "header" and scheme.get("value"):
                headers[scheme["key"]] = scheme["value"]
        return headers

    def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, content_type: str, timeout: float
    ) -> Any:
        headers = self.build_headers()
        if body is not None:
            headers["Content-Type"] = content_type
        url = f"{self.host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            response = self.client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout,
                preload_content=False,
                retries=False,
            )
            if response.status >= 400:
                raise _api_error(response.status, response.read(1 << 20))
        except _connection_errors() as error:
            raise self._unreachable(error) from None
        return response

    def _unreachable(self, error: Exception) -> ApiError:
        cause = str(error).rpartition(": ")[2].rpartition("] ")[2] or type(error).__name__  # without [Errno 111]
        return ApiError(
            f"cannot connect to {self.host} ({cause}); check that the cluster is running and --context is right"
        )


def _connection_errors() -> tuple[type[Exception], ...]:
    from urllib3.exceptions import HTTPError

    return (HTTPError, OSError)


def _api_error(status: int, body: bytes) -> ApiError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace").strip()[:300] or f"HTTP status {status}"
    remedy = {
        401: "; log in again, or choose another --context",
        403: "; ask the cluster's administrator for this permission",
    }.get(status, "")
    return ApiError(f"{message}{remedy}", status)


def job_path(namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the path of a training job, of a namespace's list, or of the list of all (None)."""
    return api_path(constants.API_VERSION, constants.PLURAL, namespace, name, subresource)


def api_path(api_version: str, plural: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the path of an object or a list on the API server."""
    parts = ["/apis" if "/" in api_version else "/api", api_version]
    parts += ["namespaces", namespace] if namespace else []
    return "/".join([*parts, plural, *filter(None, (name, subresource))])


def connect(*, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None) -> Api:
    """Log in as kubectl does: kubeconfig and context, or the service account of the pod. Raises: ClientError."""
    import yaml
    from kubernetes import client
    from kubernetes import config as untyped
    from kubernetes.config.config_exception import ConfigException

    file = kubeconfig
    if file and not Path(file).is_file():
        raise ClientError(f"--kubeconfig: file {file} does not exist; name another")
    config: Any = untyped
    configuration = client.Configuration()
    home = ""
    try:
        config.load_kube_config(config_file=file, context=context, client_configuration=configuration)
        contexts, current = config.list_kube_config_contexts(config_file=file)
        selected = next((entry for entry in contexts if entry["name"] == context), current)
        home = (selected.get("context") or {}).get("namespace", "")
    except ConfigException as error:
        if file or context:
            raise ClientError(f"the kubeconfig is invalid: {error}") from None
        try:
            config.load_incluster_config(client_configuration=configuration)
            home = _IN_CLUSTER_NAMESPACE.read_text().strip() if _IN_CLUSTER_NAMESPACE.exists() else ""
        except ConfigException:
            place = os.environ.get("KUBECONFIG") or "~/.kube/config"
            reason = f"{place} does not exist or is empty" if "No configuration found" in str(error) else error
            raise ApiError(f"no cluster is configured ({reason}); set KUBECONFIG or use --kubeconfig") from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        # The official client raises ConfigException for some malformed files only.
        cause = " ".join(str(error).split())[:200]
        raise ClientError(f"the kubeconfig is invalid ({cause}); fix it, or use another --kubeconfig") from None
    home = home or "default"
    return Api(client.ApiClient(configuration), namespace or home, home, chosen=bool(namespace))


def open_exec(api: Api, pod: str, command: Sequence[str], *, binary: bool = False, **options: Any) -> Any:
    """Return the socket of a command in a pod. Raises: ApiError, which names the permission if that is missing."""
    from kubernetes.client import ApiException
    from kubernetes.stream import ws_client

    call: Any = ws_client.websocket_call  # importing client.CoreV1Api, which calls it, takes a second
    options |= {"stdout": True, "tty": False}
    query = [(name, str(value).lower() if isinstance(value, bool) else value) for name, value in options.items()]
    query += [("command", word) for word in command]
    url = f"{api.host}{api_path('v1', 'pods', api.namespace, pod, 'exec')}?{urlencode(query)}"
    headers = api.build_headers()
    try:
        return call(api.client.configuration, "GET", url, headers=headers, binary=binary, _preload_content=False)
    except ApiException as error:
        reason = str(error.reason)
        handshake = re.match(r"Handshake status (\d+)", reason)  # the error has no status
        status = int(handshake[1]) if handshake else error.status or None
    if status in (401, 403):
        raise ApiError(
            f"the permission pods/exec in namespace {api.namespace} is missing; ask the cluster's administrator", status
        )
    raise ApiError(f"cannot run a command in pod {pod}: {reason.partition(' -+-+- ')[0]}; try again", status)


def get_job(api: Api, name: str) -> Object:
    """Return a training job. Raises: ClientError."""
    return call_job(api, "GET", name)


def call_job(
    api: Api, method: str, name: str, body: Any = None, content_type: str = "application/json", *, dry_run: bool = False
) -> Object:
    """Read, create, change or delete a training job; refuse unknown fields. Raises: ClientError."""
    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"} if method in ("POST", "PATCH") else {}
    path = job_path(api.namespace, "" if method == "POST" else name)
    try:
        return api.request(method, path, query | ({"dryRun": "All"} if dry_run else {}), body, content_type)
    except ApiError as error:
        if error.status in (400, 422):
            raise ClientError(f"refused\n{error}") from None
        if error.status != 404:
            raise
    list_jobs(api, api.namespace)  # raises if the custom resource is not installed
    raise NotFound(
        f'job "{name}" does not exist in namespace "{api.namespace}"; `ddp list -A` lists all jobs, '
        "`ddp list --local` the runs on this machine"
    )


def list_jobs(api: Api, namespace: str | None) -> Object:
    """Return the list object of a namespace's training jobs, or of all (None). Raises: ClientError."""
    try:
        return api.request("GET", job_path(namespace))
    except ApiError as error:
        if error.status != 404:
            raise
        raise ApiError(
            f"the cluster has no resource {constants.KIND}; install the operator: helm install ddp-operator charts/"
        ) from None


def profile_path(kind: str, namespace: str, name: str = "") -> str:
    """Return the path of a profile, or of the list of a kind; profiles of a cluster have no namespace."""
    own_namespace = namespace if kind == other_kinds.PROFILE_KIND else None
    return api_path(constants.API_VERSION, f"{kind.lower()}s", own_namespace, name)


def get_profile(api: Api, kind: str, namespace: str, name: str) -> Object | None:
    """Return a profile; None: it does not exist. Raises: ClientError."""
    try:
        return {"kind": kind} | api.request("GET", profile_path(kind, namespace, name))
    except ApiError as error:
        if error.status != 404:
            raise
    return None


def list_pods(api: Api, name: str, *, index: int | None = None) -> list[Object]:
    """Return the pods of a job, of all attempts that still have some; of one completion index. Raises: ClientError."""
    selector = f"{constants.LABEL_JOB_NAME}={name}"
    if index is not None:
        selector += f",{constants.ANNOTATION_COMPLETION_INDEX}={index}"  # the label has the annotation's name
    query = {"labelSelector": selector}
    items: list[Object] = api.request("GET", api_path("v1", "pods", api.namespace), query)["items"]
    return items


def list_events(api: Api, metadata: Mapping[str, Any]) -> list[Object]:
    """Return the Events about a job and about its children, oldest first. Raises: ClientError."""
    items = api.request("GET", api_path("v1", "events", api.namespace))["items"]
    return sorted((event for event in items if is_about(event, metadata)), key=read_event_time)


def find_lease_renewal(api: Api) -> LeaseRenewal | None:
    """Return the newest renewal of an operator's Lease; None: there is none, or no permission to list Leases."""
    query = {"fieldSelector": f"metadata.name={constants.MANAGED_BY}"}
    try:
        leases = api.request("GET", api_path("coordination.k8s.io/v1", "leases", None), query)["items"]
    except (ApiError, KeyError):
        return None
    return max(filter(None, map(_read_renewal, leases)), default=None)


def _read_renewal(lease: Mapping[str, Any]) -> LeaseRenewal | None:
    spec = lease.get("spec") or {}
    time = parse_time(spec.get("renewTime"))
    if time is None:
        return None
    return LeaseRenewal(time, timedelta(seconds=spec.get("leaseDurationSeconds") or 0))


def is_about(event: Mapping[str, Any], metadata: Mapping[str, Any]) -> bool:
    """Return whether an Event is about a job or one of its children. ``metadata``: of the job.

    A deleted job of the same name had children with these names, whose Events stay for an hour.
    """
    item = event.get("involvedObject") or {}
    name = metadata["name"]
    if item.get("kind") == constants.KIND:
        return bool(item.get("uid") == metadata["uid"] or (not item.get("uid") and item.get("name") == name))
    time = parse_time(read_event_time(event))
    created = parse_time(metadata.get("creationTimestamp"))
    if item.get("kind") not in ("Job", "Pod") or (time and created and time < created):
        return False
    parts = str(item.get("name", "")).split("-")
    # A Job is <name>-<attempt>, its pods are <name>-<attempt>-<index>-<five characters>.
    jobs = ["-".join(parts[:end]) for end in {len(parts), len(parts) - 2} if end > 1]
    of_features = {feature_job_name(name, feature.name) for feature in FEATURES}
    return any(is_attempt_name(job, name) or job in of_features for job in jobs)
