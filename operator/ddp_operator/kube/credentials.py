"""Read address and credentials of the API server from a kubeconfig or the pod's service account.

The result is Kopf's ``ConnectionInfo``. Kopf's own login for service accounts reads the token once, but Kubernetes
renews it every hour. Its login for kubeconfigs supports neither ``tokenFile``, ``exec`` plugins nor relative paths.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kopf
import yaml

from ddp_operator.kube.client import StartupError, trim

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_KUBECONFIG = "~/.kube/config"
EXEC_TIMEOUT = 60.0
TOKEN_LIFE = timedelta(minutes=10)
"""Maximum time until a token of a file or a plugin is read again."""


async def login(kubeconfig: str | None = None, *, service_account: Path = SERVICE_ACCOUNT) -> kopf.ConnectionInfo:
    """Read the credentials from ``kubeconfig``, otherwise the service account, otherwise ``~/.kube/config``.

    Raises: StartupError.
    """
    if kubeconfig:
        paths = [_expand(part) for part in kubeconfig.split(os.pathsep) if part.strip()]
        return await _from_kubeconfig(paths)
    if (service_account / "token").exists():
        return _from_service_account(service_account)
    default = _expand(DEFAULT_KUBECONFIG)
    if default.exists():
        return await _from_kubeconfig([default])
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


async def _from_kubeconfig(paths: list[Path]) -> kopf.ConnectionInfo:
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
        username=user.get("username"),
        password=user.get("password"),
        token=user.get("token"),
        default_namespace=context.get("namespace"),
    )
    if user.get("tokenFile"):
        return replace(info, token=_read(Path(user["tokenFile"])).strip(), expiration=datetime.now(UTC) + TOKEN_LIFE)
    if user.get("exec"):
        return await _from_plugin(info, user["exec"])
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
            config = yaml.safe_load(_read(path)) or {}
        except yaml.YAMLError as exc:
            problem = trim(" ".join(str(exc).split()), 200)
            raise StartupError(f"{path}: not a kubeconfig: {problem}") from None
        if not isinstance(config, dict):
            raise StartupError(f"{path}: not a kubeconfig")
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


async def _from_plugin(info: kopf.ConnectionInfo, spec: Mapping[str, Any]) -> kopf.ConnectionInfo:
    """Run an exec credential plugin (logins of cloud providers), as client-go does. Raises: StartupError."""
    command = str(spec.get("command"))
    request = {"apiVersion": spec.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    env = os.environ | {item["name"]: item["value"] for item in spec.get("env") or []}
    env["KUBERNETES_EXEC_INFO"] = json.dumps(request)
    try:
        process = await asyncio.create_subprocess_exec(
            command,
            *map(str, spec.get("args") or []),
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as exc:
        hint = f"; {spec['installHint']}" if spec.get("installHint") else ""
        raise StartupError(f"cannot run credential plugin {command!r}: {exc.strerror}{hint}") from None
    try:
        async with asyncio.timeout(EXEC_TIMEOUT):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise StartupError(f"credential plugin {command!r}: no response within {EXEC_TIMEOUT:.0f} s") from None
    if process.returncode:
        message = trim(err.decode(errors="replace").strip(), 300)
        raise StartupError(f"credential plugin {command!r} failed with exit code {process.returncode}: {message}")
    try:
        status = json.loads(out)["status"]
        expiry = status.get("expirationTimestamp")
        expiration = datetime.fromisoformat(expiry) if expiry else datetime.now(UTC) + TOKEN_LIFE
    except (ValueError, KeyError, TypeError):
        raise StartupError(f"credential plugin {command!r} did not print an ExecCredential with a status") from None
    return replace(
        info,
        token=status.get("token"),
        certificate_path=None if status.get("clientCertificateData") else info.certificate_path,
        certificate_data=status.get("clientCertificateData") or info.certificate_data,
        private_key_path=None if status.get("clientKeyData") else info.private_key_path,
        private_key_data=status.get("clientKeyData") or info.private_key_data,
        expiration=expiration,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise StartupError(f"{path}: {exc.strerror}") from None


def _names(paths: list[Path]) -> str:
    return os.pathsep.join(map(str, paths))
