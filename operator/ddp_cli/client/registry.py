"""Push the image of a packed folder to a registry through the OCI distribution API, with docker's logins."""

import base64
import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import getproxies, parse_http_list, parse_keqv_list, proxy_bypass

import urllib3

from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.image import INDEX, MANIFEST, Image, is_loopback

_DOCKER_HUB: Final = "docker.io"
_DOCKER_HUB_LOGIN: Final = "index.docker.io/v1/"
_DOCKER_HUB_HOST: Final = "registry-1.docker.io"
_TOKEN_USER: Final = "<token>"  # noqa: S105
"""The user name with which a credential helper returns an identity token instead of a password."""
_TIMEOUT: Final = urllib3.Timeout(connect=10, read=300)
_NO_PERMISSION: Final = "ask for the permission to push there, or name another repository"
_REMEDIES: Final = {
    401: _NO_PERMISSION,  # the token is valid, but not for this repository
    403: _NO_PERMISSION,
    404: "check the repository's name; in some registries you must create it first",
    413: "the upload is too large: exclude files in .ddpignore, or use a claim (--code-claim NAME)",
    429: "too many requests: try again later",
}
_TLS_REMEDY: Final = (
    "set SSL_CERT_FILE to a file with the CA certificates; for a registry without TLS, write http:// before its name"
)


@dataclass(frozen=True, slots=True)
class Login:
    """A user with a password, or an identity token to exchange for an access token."""

    user: str
    password: str
    token: str = ""

    def basic(self) -> str:
        """Return the header's value."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def push_image(image: Image) -> str:
    """Push what the registry lacks. Returns a line for the user. Raises: ClientError."""
    registry = _Registry(image)
    tagged = f"{image.host}/{image.repository}:{image.tag}"
    existing = registry.call("HEAD", f"manifests/{image.tag}", accept=INDEX)
    if existing.headers.get("Docker-Content-Digest") == image.digest:
        return f"{tagged} already exists"
    for digest, data in image.blobs.items():
        if registry.call("HEAD", f"blobs/{digest}").status == 404:
            location = registry.call("POST", "blobs/uploads/").headers.get("Location", "")
            registry.call("PUT", _extend(location, {"digest": digest}), data, "application/octet-stream")
    for digest, data in image.manifests.items():
        registry.call("PUT", f"manifests/{digest}", data, MANIFEST)
    registry.call("PUT", f"manifests/{image.tag}", image.index, INDEX)
    return f"pushed as {tagged}"


def find_login(host: str) -> Login | None:
    """Return the login that `docker login` stored for a registry; None: there is none. Raises: ClientError."""
    file = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"), "config.json")
    key = _DOCKER_HUB_LOGIN if host == _DOCKER_HUB else host
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        helpers = config.get("credHelpers") or {}
        helper = helpers.get(key) or helpers.get(host) or config.get("credsStore")
        entry = _find_entry(config.get("auths") or {}, key)
        user, _, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
        token = entry.get("identitytoken") or ""
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ClientError(f"{file} is invalid ({error}); write it again with `docker login {host}`") from None
    login = _call_helper(helper, f"https://{key}" if host == _DOCKER_HUB else key) if helper else None
    return login or (Login(user, password, token) if user or token else None)


def _find_entry(auths: Mapping[str, dict[str, str]], key: str) -> dict[str, str]:
    """Return a registry's entry, empty if there is none. Keys are hosts; older versions of docker wrote URLs."""
    host = re.sub(r"/.*$", "", key)
    entries = (entry for name, entry in auths.items() if re.sub(r"^https?://|/.*$", "", name) == host)
    return next(entries, {})


def _call_helper(helper: str, key: str) -> Login | None:
    """Return the login for a registry from docker's credential helper; None: it has none. Raises: ClientError."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run([program, "get"], input=key, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0 and "not found" in done.stdout + done.stderr:
            return None
        done.check_returncode()
        credentials = json.loads(done.stdout)
        user = credentials["Username"]
        secret = credentials["Secret"]
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or error.stdout.strip() or f"exit code {error.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)
    raise ClientError(
        f"{program}, the credential helper for {key} in docker's config.json, failed: {reason}; fix it, or remove it "
        "from config.json"
    )


class _Registry:
    """One repository of a registry. It logs in when the registry requires it."""

    def __init__(self, image: Image) -> None:
        self._host = image.host
        self._repository = image.repository
        scheme = "http" if image.plain else "https"
        address = _DOCKER_HUB_HOST if image.host == _DOCKER_HUB else image.host
        self._base = f"{scheme}://{address}/v2/{image.repository}/"
        direct = is_loopback(address) or proxy_bypass(address)
        proxy = None if direct else getproxies().get(scheme)
        self._pool = urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager()
        self._authorization = ""
        self._login: Login | None = None

    def call(
        self, method: str, path: str, body: bytes | None = None, content_type: str = "", accept: str = ""
    ) -> urllib3.BaseHTTPResponse:
        """Make one call; a HEAD may return 404. Raises: ClientError."""
        url = urlsplit(urljoin(self._base, path))
        base = urlsplit(self._base)
        # The login is not sent to another host, which an upload may use. A registry behind a proxy that terminates TLS
        # may not know its own scheme.
        is_own_host = url.netloc == base.netloc
        address = url._replace(scheme=base.scheme).geturl() if is_own_host else url.geturl()
        headers = {"User-Agent": "ddp", "Content-Type": content_type, "Accept": accept}
        for is_retry in (False, True):
            headers["Authorization"] = self._authorization if is_own_host else ""
            response = self._send(method, address, body, {name: value for name, value in headers.items() if value})
            if response.status != 401 or is_retry:
                break
            self._authorize(response)
        exists_elsewhere = method == "HEAD" and response.status < 400  # a redirect to the registry's storage
        is_missing = method == "HEAD" and response.status == 404
        if not (200 <= response.status < 300 or exists_elsewhere or is_missing):
            raise self._refused(response)
        return response

    def _authorize(self, refusal: urllib3.BaseHTTPResponse) -> None:
        """Log in by the scheme that the registry requires. Raises: ClientError."""
        self._login = find_login(self._host)
        self._authorization = ""
        scheme, _, challenge = refusal.headers.get("WWW-Authenticate", "").partition(" ")
        if scheme.lower() == "bearer":
            self._authorization = self._request_token(parse_keqv_list(parse_http_list(challenge)))
        elif self._login is None or self._login.token:
            raise self._refused(refusal)
        else:
            self._check_receiver(self._base)
            self._authorization = self._login.basic()

    def _check_receiver(self, url: str) -> None:
        """Check that the login may be sent there: to the registry's domain, with TLS. Raises: ClientError."""
        scheme, host = _split_url(url)
        _, registry = _split_url(self._base)
        parent = registry.partition(".")[2] if re.search(r"[a-z]$", registry) else ""
        domain = parent if "." in parent else registry  # gitlab.com logs in for registry.gitlab.com
        is_own = f".{host}".endswith(f".{domain}") or (is_loopback(host) and is_loopback(registry))
        if not host or not is_own:
            problem = f"asks for the login at another domain ({host or url})"
        elif scheme != "https" and not is_loopback(host):
            problem = f"asks for the login without TLS ({scheme}://{host})"
        else:
            return
        raise ClientError(
            f"--code-image: the registry {self._host} {problem}, and ddp does not send it there; correct the "
            "registry's configuration, use another one, or a claim (--code-claim NAME)"
        )

    def _request_token(self, challenge: dict[str, str]) -> str:
        """Return the Authorization header with a token (docs.docker.com/registry/spec/auth). Raises: ClientError."""
        realm = challenge.get("realm", "")
        if self._login is not None:
            self._check_receiver(realm)
        query = {"scope": f"repository:{self._repository}:pull,push"}
        if "service" in challenge:
            query["service"] = challenge["service"]
        if self._login is not None and self._login.token:
            form = query | {"grant_type": "refresh_token", "client_id": "ddp", "refresh_token": self._login.token}
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            response = self._send("POST", realm, urlencode(form).encode(), headers)
        else:
            headers = {"Authorization": self._login.basic()} if self._login is not None else {}
            response = self._send("GET", _extend(realm, query), None, headers)
        if response.status >= 400:
            raise self._refused(response)
        try:
            body = response.json()
            return f"Bearer {body.get('token') or body['access_token']}"
        except (ValueError, LookupError, AttributeError):
            raise ClientError(
                f"{realm}: the response has no token for {self._host}; check that this is the registry's login service"
            ) from None

    def _send(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.request(
                method, url, body=body, headers=headers, timeout=_TIMEOUT, retries=False, redirect=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            cause = str(error).rpartition(": ")[2].rpartition("] ")[2] or type(error).__name__  # without [Errno 111]
            remedy = _TLS_REMEDY if isinstance(error, urllib3.exceptions.SSLError) else "check its name and the network"
            raise ClientError(
                f"--code-image: cannot connect to the registry {self._host} ({cause}); {remedy}"
            ) from None

    def _refused(self, response: urllib3.BaseHTTPResponse) -> ClientError:
        """Return the error for a response, with its remedy."""
        status = response.status
        if status in (401, 403) and self._login is None:
            remedy = f"log in with `docker login {self._host}`"
        elif status == 401 and not self._authorization.startswith("Bearer"):
            remedy = f"the login is invalid: run `docker login {self._host}` again"
        elif status in _REMEDIES:
            remedy = _REMEDIES[status]
        else:
            remedy = "try again later" if status >= 500 else "check that the registry accepts OCI images"
        return ClientError(
            f"--code-image: the registry {self._host} refuses {self._repository}: {_read_message(response)}; {remedy}"
        )


def _split_url(url: str) -> tuple[str, str]:
    """Return scheme and host of a URL; empty for one that another parser could read in another way."""
    match = re.fullmatch(r"(https?)://([\w.-]+|\[[\da-f:.]+\])(?::\d+)?(?:[/?].*)?", url.lower(), re.ASCII | re.DOTALL)
    return (match[1], match[2]) if match else ("", "")


def _read_message(response: urllib3.BaseHTTPResponse) -> str:
    """Return the registry's message with the status, or the status alone."""
    status = f"HTTP status {response.status}"
    try:
        body: Any = response.json()
        return f"{body['errors'][0]['message']} ({status})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return status


def _extend(url: str, query: dict[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"
