"""The calls that the commands make: plain JSON over the official client's login and connections."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from ddp_operator import constants
from ddp_operator.cli.errors import CommandError, ExitCode

Object = dict[str, Any]

FIELD_MANAGER: Final = "ddp"
MERGE_PATCH: Final = "application/merge-patch+json"
_SECONDS: Final = 30.0
_IN_CLUSTER_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ApiRefusal(CommandError):
    """The API server answered, and not with what was asked for. ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, ExitCode.NOT_FOUND if status == 404 else ExitCode.CLUSTER)
        self.status = status


class Api:
    """One API server, and the namespace that the commands work in."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client = client
        self.namespace = namespace
        self._host = client.configuration.host.rstrip("/")

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        """Make one call and return its JSON. Raises: CommandError."""
        answer = self._send(method, path, query, body, content_type, _SECONDS)
        try:
            return dict(json.loads(answer.data))
        except ValueError:
            raise CommandError(f"{self._host}{path}: the answer is not JSON", ExitCode.CLUSTER) from None

    def lines(self, path: str, query: Mapping[str, str] | None = None, *, timeout: float = _SECONDS) -> Iterator[str]:
        """Yield the lines of an answer as they come; a silence of more than ``timeout`` seconds ends it.

        Raises: CommandError.
        """
        answer = self._send("GET", path, query, None, "", timeout)
        rest = b""
        try:
            for chunk in answer.stream(1 << 16):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line.decode("utf-8", "replace")
        except self._errors() as error:
            raise self._unreachable(error) from None
        finally:
            answer.close()
        if rest:
            yield rest.decode("utf-8", "replace")

    def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, content_type: str, timeout: float
    ) -> Any:
        configuration = self.client.configuration
        headers = {"Accept": "application/json", "User-Agent": "ddp"} | dict(self.client.default_headers)
        for scheme in configuration.auth_settings().values():
            if scheme.get("in") == "header" and scheme.get("value"):
                headers[scheme["key"]] = scheme["value"]
        if content_type and body is not None:
            headers["Content-Type"] = content_type
        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        try:
            answer = self.client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout,
                preload_content=False,
                retries=False,
            )
            if answer.status >= 400:
                raise _refusal(answer.status, answer.read(1 << 20), url)
        except self._errors() as error:
            raise self._unreachable(error) from None
        return answer

    def _errors(self) -> tuple[type[Exception], ...]:
        from urllib3.exceptions import HTTPError

        return (HTTPError, OSError)

    def _unreachable(self, error: Exception) -> CommandError:
        words = str(error).rpartition(": ")[2].rpartition("] ")[2] or type(error).__name__  # [Errno 111] apart
        return CommandError(
            f"{self._host} does not answer ({words}); is the cluster up, and is the context the right one?",
            ExitCode.CLUSTER,
        )


def job_path(namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the path of a training job, of a namespace's list, or of the list of all (None)."""
    return place(constants.API_VERSION, constants.PLURAL, namespace, name, subresource)


def place(api_version: str, plural: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return a path of the API server's tree."""
    parts = ["/apis" if "/" in api_version else "/api", api_version]
    parts += ["namespaces", namespace] if namespace else []
    return "/".join([*parts, plural, *(part for part in (name, subresource) if part)])


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every command needs that talks to a cluster."""
    group = parser.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", metavar="NAME", help="default: the context's, else default")
    group.add_argument("--context", metavar="NAME", help="of the kubeconfig; default: its current one")
    group.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config, else the pod's")


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--output json``."""
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: text")


def connect(arguments: argparse.Namespace) -> Api:
    """Log in as kubectl does: kubeconfig and context, or the account of the pod. Raises: CommandError."""
    try:
        import yaml
        from kubernetes import client
        from kubernetes import config as untyped
        from kubernetes.config.config_exception import ConfigException
    except ImportError:
        raise CommandError("needs the Kubernetes client: pip install 'ddp-operator[cli]'") from None
    if arguments.kubeconfig and not Path(arguments.kubeconfig).is_file():
        raise CommandError(f"--kubeconfig: there is no file {arguments.kubeconfig}")
    config: Any = untyped
    configuration = client.Configuration()
    namespace = ""
    try:
        config.load_kube_config(
            config_file=arguments.kubeconfig, context=arguments.context, client_configuration=configuration
        )
        contexts, current = config.list_kube_config_contexts(config_file=arguments.kubeconfig)
        chosen = next((entry for entry in contexts if entry["name"] == arguments.context), current)
        namespace = (chosen.get("context") or {}).get("namespace", "")
    except ConfigException as error:
        if arguments.kubeconfig or arguments.context:
            raise CommandError(f"the kubeconfig does not say how to log in: {error}") from None
        try:
            config.load_incluster_config(client_configuration=configuration)
            namespace = _IN_CLUSTER_NAMESPACE.read_text().strip() if _IN_CLUSTER_NAMESPACE.exists() else ""
        except ConfigException:
            raise CommandError(
                f"no cluster to talk to ({error}); set KUBECONFIG or give --kubeconfig", ExitCode.CLUSTER
            ) from None
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        # The official client says so of some files that are no kubeconfig; others it trips over.
        words = " ".join(str(error).split())[:200]
        raise CommandError(f"the kubeconfig cannot be read ({words}); mend it, or give another --kubeconfig") from None
    return Api(client.ApiClient(configuration), arguments.namespace or namespace or "default")


def get_job(api: Api, name: str) -> Object:
    """Return a training job. Raises: CommandError."""
    try:
        return api.request("GET", job_path(api.namespace, name))
    except ApiRefusal as refusal:
        raise explain_missing(refusal, api, name) from None


def write(
    api: Api, method: str, path: str, body: Object, content_type: str = "application/json", *, dry_run: bool = False
) -> Object:
    """Create or change a training job; what its type does not know is refused, not dropped. Raises: CommandError."""
    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
    try:
        return api.request(method, path, query, body, content_type)
    except ApiRefusal as refusal:
        if refusal.status in (400, 422):
            raise CommandError(f"refused\n{refusal}", ExitCode.BAD_INPUT) from None
        raise


def explain_missing(refusal: ApiRefusal, api: Api, name: str) -> CommandError:
    """Return a refusal in words about the job ``name``, where it is a 404."""
    if refusal.status != 404:
        return refusal
    list_jobs(api, api.namespace)  # a 404 here says that the cluster does not know the kind
    return CommandError(
        f'there is no job "{name}" in namespace "{api.namespace}"; `ddp list -A` lists all jobs',
        ExitCode.NOT_FOUND,
    )


def list_jobs(api: Api, namespace: str | None) -> Object:
    """Return the list object of a namespace's training jobs, or of all (None). Raises: CommandError."""
    try:
        return api.request("GET", job_path(namespace))
    except ApiRefusal as refusal:
        if refusal.status != 404:
            raise
        raise CommandError(
            f"the cluster does not know {constants.KIND}; install the operator: helm install ddp-operator charts/",
            ExitCode.CLUSTER,
        ) from None


def list_pods(api: Api, name: str) -> list[Object]:
    """Return the pods of a job, of all attempts that still have some. Raises: CommandError."""
    query = {"labelSelector": f"{constants.LABEL_JOB_NAME}={name}"}
    items: list[Object] = api.request("GET", place("v1", "pods", api.namespace), query)["items"]
    return items


def list_events(api: Api, name: str, uid: str) -> list[Object]:
    """Return the Events about a job and about its children, oldest first. Raises: CommandError."""
    found = api.request("GET", place("v1", "events", api.namespace))["items"]
    ours = [event for event in found if _is_about(event.get("involvedObject") or {}, name, uid)]
    return sorted(ours, key=event_time)


def event_time(event: Mapping[str, Any]) -> str:
    """Return when an Event was last seen, as RFC 3339, or an empty string."""
    series = event.get("series") or {}
    candidates = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next(filter(None, candidates), (event.get("metadata") or {}).get("creationTimestamp") or ""))


def _is_about(thing: Mapping[str, Any], name: str, uid: str) -> bool:
    from ddp_operator.names import is_job_name

    if thing.get("kind") == constants.KIND:
        return bool(thing.get("uid") == uid or (not thing.get("uid") and thing.get("name") == name))
    if thing.get("kind") not in ("Job", "Pod"):
        return False
    words = str(thing.get("name", "")).split("-")
    # A Job is <name>-<attempt>, its pods are <name>-<attempt>-<index>-<five characters>.
    return any(is_job_name("-".join(words[:cut]), name) for cut in {len(words), len(words) - 2} if cut > 1)


def _refusal(status: int, body: bytes, url: str) -> ApiRefusal:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace").strip()[:300] or f"HTTP status {status}"
    remedy = {
        401: "; log in again, or choose another --context",
        403: "; ask the cluster's owner for that permission",
    }.get(status, "")
    return ApiRefusal(f"{message}{remedy}", status)
