"""Read address and credentials of the API server from a kubeconfig or the pod's service account.

The result is Kopf's ``ConnectionInfo``. Kopf's own login for service accounts reads the token once, but Kubernetes
renews it every hour. Its login for kubeconfigs supports neither ``tokenFile`` nor relative paths.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kopf

from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.kube.client import StartupError, trim

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_KUBECONFIG = "~/.kube/config"
TOKEN_LIFE = timedelta(minutes=10)
"""Maximum time until a token of a file is read again."""


async def login(kubeconfig: str | None = None, *, service_account: Path = SERVICE_ACCOUNT) -> kopf.ConnectionInfo:
    """Read the credentials from ``kubeconfig``, otherwise the service account, otherwise ``~/.kube/config``.

    Raises: StartupError.
    """
    if kubeconfig:
        paths = [_expand(part) for part in kubeconfig.split(os.pathsep) if part.strip()]
        return _from_kubeconfig(paths)
    if (service_account / "token").exists():
        return _from_service_account(service_account)
    default = _expand(DEFAULT_KUBECONFIG)
    if default.exists():
        return _from_kubeconfig([default])
    raise StartupError(
        "no credentials for a cluster: run in a pod with a service account, "
        f"set KUBECONFIG to a kubeconfig file, or put one at {DEFAULT_KUBECONFIG}"
    )


def _expand(name: str) -> Path:
    # Path.expanduser raises for a user without a home folder, such as that of a pod.
    return Path(os.path.expanduser(name))


def _from_service_account(folder: Path, env: Mapping[str, str] | None = None) -> kopf.ConnectionInfo:
    env = os.environ if env is None else env
    # The address in the environment does not need the cluster's DNS.
    host = env.get("KUBERNETES_SERVICE_HOST")
    port = env.get("KUBERNETES_SERVICE_PORT", "443")
    if host:
        server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    else:
        server = "https://kubernetes.default.svc"
    namespace = folder / "namespace"
    return kopf.ConnectionInfo(
        server=server,
        ca_path=str(folder / "ca.crt") if (folder / "ca.crt").exists() else None,
        token=_read(folder / "token").strip(),
        default_namespace=_read(namespace).strip() if namespace.exists() else None,
        expiration=datetime.now(UTC) + TOKEN_LIFE,
    )


def _from_kubeconfig(paths: list[Path]) -> kopf.ConnectionInfo:
    context, cluster, user = _merge(paths)
    if not cluster.get("server"):
        raise StartupError(f"{_names(paths)}: the cluster of the current context has no server")
    info = kopf.ConnectionInfo(
        server=str(cluster["server"]),
        ca_path=None if cluster.get("certificate-authority-data") else cluster.get("certificate-authority"),
        ca_data=cluster.get("certificate-authority-data"),
        insecure=cluster.get("insecure-skip-tls-verify"),
        proxy_url=cluster.get("proxy-url"),
        certificate_path=None if user.get("client-certificate-data") else user.get("client-certificate"),
        certificate_data=user.get("client-certificate-data"),
        private_key_path=None if user.get("client-key-data") else user.get("client-key"),
        private_key_data=user.get("client-key-data"),
        token=user.get("token"),
        default_namespace=context.get("namespace"),
    )
    if user.get("tokenFile"):
        return replace(info, token=_read(Path(user["tokenFile"])).strip(), expiration=datetime.now(UTC) + TOKEN_LIFE)
    if user.get("exec"):
        raise StartupError(
            f"{_names(paths)}: the user of the current context has a credential plugin (exec), which the operator does "
            "not run; use the token of a service account (`kubectl create token`), or run the operator in the cluster"
        )
    return info


def _merge(paths: list[Path]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the current context with its cluster and user. For equal names the first file counts, as in kubectl.

    Raises: StartupError.
    """
    current: str | None = None
    merged: dict[str, dict[str, dict[str, Any]]] = {"contexts": {}, "clusters": {}, "users": {}}
    files_read = 0
    for path in paths:
        if not path.exists():
            continue  # as kubectl does
        try:
            documents = load_documents(_read(path))
        except InvalidManifest as exc:
            problem = trim(" ".join(str(exc).split()), 200)
            raise StartupError(f"{path}: not a kubeconfig: {problem}") from None
        config = documents[0] if documents else {}
        files_read += 1
        current = current or config.get("current-context")
        for kind, entries in merged.items():
            for item in config.get(kind) or []:
                content = item.get(kind[:-1]) or {}
                entries.setdefault(item["name"], _absolute(content, path.parent))
    if not files_read:
        raise StartupError(f"{_names(paths)}: no such file; set KUBECONFIG to an existing kubeconfig")
    if not current:
        raise StartupError(f"{_names(paths)}: no current-context; choose one with `kubectl config use-context`")
    context = merged["contexts"].get(current)
    if context is None:
        raise StartupError(f"{_names(paths)}: the current context {current!r} is not among its contexts")
    cluster = merged["clusters"].get(context.get("cluster", ""))
    if cluster is None:
        raise StartupError(f"{_names(paths)}: context {current!r} names a cluster that does not exist")
    return context, cluster, merged["users"].get(context.get("user", ""), {})


def _absolute(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve the paths of one entry against the folder of its file."""
    keys = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
    return content | {key: str(folder / content[key]) for key in keys if content.get(key)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise StartupError(f"{path}: {exc.strerror}") from None


def _names(paths: list[Path]) -> str:
    return os.pathsep.join(map(str, paths))
