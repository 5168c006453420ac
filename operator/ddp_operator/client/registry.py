"""The image with a packed folder into a registry, by the distribution API and with docker's logins."""

import base64
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import getproxies, parse_http_list, parse_keqv_list, proxy_bypass

import urllib3

from ddp_operator.client.errors import ClientError
from ddp_operator.code.image import INDEX, MANIFEST, Image, is_loopback

_DOCKER_HUB: Final = "docker.io"
_DOCKER_HUB_LOGIN: Final = "index.docker.io/v1/"
_DOCKER_HUB_HOST: Final = "registry-1.docker.io"
_TOKEN_USER: Final = "<token>"  # noqa: S105
"""As whom a credential program gives a token that buys tokens, and no password."""
_TIMEOUT: Final = urllib3.Timeout(connect=10, read=300)
_MAY_NOT_PUSH: Final = "ask for the right to push there, or name another repository"
_REMEDIES: Final = {
    401: _MAY_NOT_PUSH,  # a token was given, and is not good for this
    403: _MAY_NOT_PUSH,
    404: "check the repository's name; some registries want it to be made first",
    413: "it does not take as much at once: leave out more (.ddpignore), or put it on a claim (--code-claim NAME)",
    429: "it has had too many requests: try again later",
}
_TLS_REMEDY: Final = (
    "SSL_CERT_FILE names a file with the certificates that are trusted; write http:// before the name of a registry "
    "without TLS"
)


@dataclass(frozen=True, slots=True)
class Login:
    """A user with a password; ``token``: what is exchanged instead of these."""

    user: str
    password: str
    token: str = ""

    def basic(self) -> str:
        """Return the header's value."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def push_image(image: Image) -> str:
    """Push what the registry does not have yet. Returns what was done. Raises: ClientError."""
    registry = _Registry(image)
    tagged = f"{image.host}/{image.repository}:{image.tag}"
    there = registry.call("HEAD", f"manifests/{image.tag}", accept=INDEX)
    if there.headers.get("Docker-Content-Digest") == image.digest:
        return f"{tagged} has it already"
    for digest, data in image.blobs.items():
        if registry.call("HEAD", f"blobs/{digest}").status == 404:
            place = registry.call("POST", "blobs/uploads/").headers.get("Location", "")
            registry.call("PUT", _extend(place, {"digest": digest}), data, "application/octet-stream")
    for digest, data in image.manifests.items():
        registry.call("PUT", f"manifests/{digest}", data, MANIFEST)
    registry.call("PUT", f"manifests/{image.tag}", image.index, INDEX)
    return f"pushed as {tagged}"


def find_login(host: str) -> Login | None:
    """Return what `docker login` has kept for a registry; None: nothing. Raises: ClientError."""
    file = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"), "config.json")
    key = _DOCKER_HUB_LOGIN if host == _DOCKER_HUB else host
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        helpers, auths = config.get("credHelpers") or {}, config.get("auths") or {}
        helper = helpers.get(key) or helpers.get(host) or config.get("credsStore")
        # The keys are hosts, or URLs as docker wrote them once.
        found = (auths[one] for one in auths if re.sub(r"^https?://|/.*$", "", one) == re.sub(r"/.*$", "", key))
        entry: dict[str, str] = next(found, {})
        user, _, password = base64.b64decode(entry.get("auth") or "").decode().partition(":")
        token = entry.get("identitytoken") or ""
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ClientError(f"{file}: cannot be used ({error}); write it again with `docker login {host}`") from None
    login = _ask(helper, f"https://{key}" if host == _DOCKER_HUB else key) if helper else None
    return login or (Login(user, password, token) if user or token else None)


def _ask(helper: str, key: str) -> Login | None:
    """Return what docker's credential program has for a registry. Raises: ClientError."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run([program, "get"], input=key, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0 and "not found" in done.stdout + done.stderr:
            return None
        done.check_returncode()
        found = json.loads(done.stdout)
        user, secret = found["Username"], found["Secret"]
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip() or error.stdout.strip() or f"exit code {error.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)
    raise ClientError(f"{program}, which docker's config.json names for {key}, gives no login: {reason}; see to that")


class _Registry:
    """One repository of a registry, logged in to when it asks for that."""

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
        """Make one call; a HEAD may find nothing (404). Raises: ClientError."""
        url, base = urlsplit(urljoin(self._base, path)), urlsplit(self._base)
        # An upload may go to another host, which the login is not for. A registry behind a proxy that ends TLS may
        # not know its own scheme.
        ours = url.netloc == base.netloc
        address = url._replace(scheme=base.scheme).geturl() if ours else url.geturl()
        headers = {"User-Agent": "ddp", "Content-Type": content_type, "Accept": accept}
        for again in (False, True):
            headers["Authorization"] = self._authorization if ours else ""
            response = self._send(method, address, body, {name: value for name, value in headers.items() if value})
            if response.status != 401 or again:
                break
            self._authorize(response)
        redirected = method == "HEAD" and response.status < 400  # a storage behind it has what is asked for
        if not (200 <= response.status < 300 or redirected or (method, response.status) == ("HEAD", 404)):
            raise self._refused(response)
        return response

    def _authorize(self, refusal: urllib3.BaseHTTPResponse) -> None:
        """Log in as the registry wants it. Raises: ClientError."""
        self._login, self._authorization = find_login(self._host), ""
        kind, _, rest = refusal.headers.get("WWW-Authenticate", "").partition(" ")
        if kind.lower() != "bearer":
            if self._login is None or self._login.token:
                raise self._refused(refusal)
            self._authorization = self._login.basic()
            return
        asked = parse_keqv_list(parse_http_list(rest))
        realm, scope = asked.get("realm", ""), f"repository:{self._repository}:pull,push"
        query = {"scope": scope} | ({"service": asked["service"]} if "service" in asked else {})
        if self._login is not None and self._login.token:
            form = query | {"grant_type": "refresh_token", "client_id": "ddp", "refresh_token": self._login.token}
            kind_of_form = {"Content-Type": "application/x-www-form-urlencoded"}
            response = self._send("POST", realm, urlencode(form).encode(), kind_of_form)
        else:
            headers = {"Authorization": self._login.basic()} if self._login is not None else {}
            response = self._send("GET", _extend(realm, query), None, headers)
        if response.status >= 400:
            raise self._refused(response)
        try:
            answer = response.json()
            self._authorization = f"Bearer {answer.get('token') or answer['access_token']}"
        except (ValueError, LookupError, AttributeError):
            raise ClientError(f"{realm}: gives no token for {self._host}; see whether this is its login") from None

    def _send(self, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> urllib3.BaseHTTPResponse:
        try:
            return self._pool.request(
                method, url, body=body, headers=headers, timeout=_TIMEOUT, retries=False, redirect=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            words = str(error).rpartition(": ")[2].rpartition("] ")[2] or type(error).__name__  # without [Errno 111]
            remedy = _TLS_REMEDY if isinstance(error, urllib3.exceptions.SSLError) else "check its name and the network"
            raise ClientError(
                f"--code-image: cannot connect to the registry {self._host} ({words}); {remedy}"
            ) from None

    def _refused(self, response: urllib3.BaseHTTPResponse) -> ClientError:
        what, login = f"--code-image: the registry {self._host} refuses", f"`docker login {self._host}`"
        status, said = response.status, _read_message(response)
        if status in (401, 403) and self._login is None:
            remedy = f"there is no login for it: run {login}"
        elif status == 401 and not self._authorization.startswith("Bearer"):
            remedy = f"the login is not valid: run {login} again"
        else:
            remedy = _REMEDIES.get(status) or (
                "try again later" if status >= 500 else "see whether it takes OCI images"
            )
        return ClientError(f"{what} {self._repository}: {said}; {remedy}")


def _read_message(response: urllib3.BaseHTTPResponse) -> str:
    """Return the registry's own words, and the status of a response without any."""
    words = f"HTTP status {response.status}"
    try:
        answer: Any = response.json()
        return f"{answer['errors'][0]['message']} ({words})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return words


def _extend(url: str, query: dict[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"
