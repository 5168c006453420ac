"""A folder as an image in a registry: the uploads, the login, and the messages of refusals."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.files import CannotPack
from ddp_cli.client.packing.image import Image
from ddp_cli.client.packing.packed import pack_code
from ddp_cli.client.registry import Login, find_login, push_image
from tests.support.registry import Registry, serve_registry
from tests.support.users import forget_user


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without logins or proxies."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DOCKER_CONFIG", "http_proxy", "HTTP_PROXY", "https_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serve_registry(Registry()) as registry:
        yield registry


def image(tmp_path: Path, name: str) -> Image:
    (tmp_path / "source").mkdir(exist_ok=True)
    (tmp_path / "source" / "train.py").write_text("print()\n")
    built = pack_code(tmp_path / "source", image=name).image
    assert built is not None
    return built


def log_in(home: Path, **config: Any) -> None:
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker" / "config.json").write_text(json.dumps(config))


def password(login: tuple[str, str] = ("ann", "pass:word")) -> dict[str, str]:
    return {"auth": base64.b64encode(":".join(login).encode()).decode()}


def test_existing_image_is_not_pushed_again(tmp_path: Path, registry: Registry) -> None:
    built = image(tmp_path, f"{registry.host}/team/code:mine")
    assert push_image(built) == f"pushed as {registry.host}/team/code:mine"
    assert built.reference == f"{registry.host}/team/code@{built.digest}"
    index = json.loads(registry.manifests["mine"])
    assert [entry["platform"]["architecture"] for entry in index["manifests"]] == ["amd64", "arm64"]
    for item in index["manifests"]:
        manifest = json.loads(registry.manifests[item["digest"]])
        config = json.loads(registry.blobs[manifest["config"]["digest"]])
        assert {"architecture": config["architecture"], "os": config["os"]} == item["platform"]
        [layer] = manifest["layers"]
        assert config["rootfs"]["diff_ids"] == [layer["digest"]]
        with tarfile.open(fileobj=io.BytesIO(registry.blobs[layer["digest"]])) as tar:
            assert [(member.name, member.mode, member.mtime) for member in tar] == [("code.tar.gz", 0o444, 0)]
            assert layer["size"] == len(registry.blobs[layer["digest"]])

    sent = registry.pushed()
    assert push_image(built).endswith("already exists")
    assert registry.pushed() == sent
    del registry.manifests["mine"]  # the blobs exist
    push_image(built)
    assert registry.pushed() == sent + 3
    assert image(tmp_path, f"{registry.host}/team/code").tag == built.digest.removeprefix("sha256:")[:12]


def test_proxy_is_for_other_machines(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://{registry.host}")
    push_image(image(tmp_path, "http://registry.example.com/team/code"))
    assert registry.pushed() == 6
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    push_image(image(tmp_path, f"{registry.host}/team/code:again"))
    assert "again" in registry.manifests


def test_same_files_are_same_image(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = image(tmp_path, "registry.example.com/team/code:a")
    assert image(tmp_path / "other", "https://registry.example.com/team/code:b").digest == first.digest
    (tmp_path / "source" / "more.py").write_text("")
    assert image(tmp_path, "registry.example.com/team/code:a").digest != first.digest


@pytest.mark.parametrize("auth", ["bearer", "basic"])
def test_login_follows_challenge_of_registry(tmp_path: Path, home: Path, registry: Registry, auth: str) -> None:
    registry.auth = auth
    log_in(home, auths={f"https://{registry.host}/v1/": password()})
    push_image(image(tmp_path, f"{registry.host}/team/code"))
    assert registry.pushed() == 6
    assert set(registry.scopes) == ({"repository:team/code:pull,push"} if auth == "bearer" else set())
    assert sum(status == 401 for _, _, status in registry.calls) == 1, "the token is kept"


def test_token_buys_tokens(tmp_path: Path, home: Path, registry: Registry) -> None:
    registry.auth = "bearer"
    log_in(home, auths={registry.host: {"auth": password(("0000", ""))["auth"], "identitytoken": "kept"}})
    push_image(image(tmp_path, f"{registry.host}/team/code"))
    assert ("POST", "/token", 200) in registry.calls


def test_login_is_sent_only_to_registry_and_its_scheme(tmp_path: Path, home: Path, registry: Registry) -> None:
    # as behind a proxy that ends TLS
    registry.auth = "basic"
    registry.uploads = f"https://{registry.host}"
    log_in(home, auths={registry.host: password()})
    push_image(image(tmp_path, f"{registry.host}/team/code"))
    assert registry.pushed() == 6
    registry.blobs.clear()
    with serve_registry(Registry(blobs=registry.blobs)) as storage:
        registry.uploads = f"http://{storage.host}"
        push_image(image(tmp_path, f"{registry.host}/team/code:again"))
        assert (storage.pushed(), set(storage.logins)) == (3, {""})


@pytest.mark.parametrize(
    "realm",
    [
        "https://example.com/token",
        "https://127.0.0.1.example.com/token",
        "https://0.0.1/token",
        "https://127.0.0.1@example.com/token",
        r"https://example.com\\@127.0.0.1/token",  # urlsplit and urllib3 read different hosts
        "//example.com/token",
        "https://a b/",
        "",
    ],
)
def test_login_is_not_sent_to_realm_of_another_domain(
    tmp_path: Path, home: Path, registry: Registry, realm: str
) -> None:
    registry.auth = "bearer"
    registry.realm = realm or "/token"
    log_in(home, auths={registry.host: password()})
    with pytest.raises(ClientError, match=rf"the registry {registry.host} asks for the login at another domain"):
        push_image(image(tmp_path, f"{registry.host}/team/code"))


@pytest.mark.parametrize(
    ("registry_host", "realm", "is_sent"),
    [
        ("registry.gitlab.com", "https://gitlab.com/jwt/auth", True),
        ("registry.example.com", "https://gitlab.example.com:8443/jwt/auth", True),
        ("docker.io", "https://auth.docker.io/token", True),
        ("ghcr.io", "https://ghcr.io/token", True),
        ("ghcr.io", "https://evil.io/token", False),
        ("registry.gitlab.com", "https://notgitlab.com/jwt/auth", False),
        ("registry.gitlab.com", "http://gitlab.com/jwt/auth", False),
        ("http://registry.internal", "http://registry.internal/token", False),
        ("http://registry.internal", None, False),
        ("localhost:5000", "http://127.0.0.1:5001/auth", True),
        ("localhost:5000", "http://registry.internal/auth", False),
    ],
)
def test_login_is_sent_with_tls_within_domain(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, registry_host: str, realm: str | None, is_sent: bool
) -> None:
    sent = []

    def respond(pool: Any, method: str, url: str, **options: Any) -> urllib3.HTTPResponse:
        if method == "GET":
            sent.append(options["headers"].get("Authorization", ""))
        challenge = f'Bearer realm="{realm}"' if realm else 'Basic realm="r"'
        return urllib3.HTTPResponse(b"{}", {"WWW-Authenticate": challenge}, 401, preload_content=False)

    monkeypatch.setattr(urllib3.PoolManager, "request", respond)
    name = registry_host.removeprefix("http://")
    log_in(home, auths={"https://index.docker.io/v1/" if name == "docker.io" else name: password()})
    with pytest.raises(ClientError, match="the login is invalid" if is_sent else "and ddp does not send it there"):
        push_image(image(tmp_path, f"{registry_host}/team/code"))
    assert [login.partition(" ")[0] for login in sent] == ["Basic"] * is_sent


HELPER = """#!/bin/sh
read -r host
echo "$host" >> {asked}
[ "$host" = none.example.com ] && echo "credentials not found in native keychain" && exit 1
[ "$host" = broken.example.com ] && echo "no keychain" >&2 && exit 1
[ "$host" = odd.example.com ] && echo "{{}}" && exit
[ "$host" = token.example.com ] && echo '{{"Username": "<token>", "Secret": "t"}}' && exit
echo '{{"Username": "bob", "Secret": "hidden"}}'
"""


def test_credential_helpers_of_docker_are_called(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = home / "bin" / "docker-credential-chain"
    program.parent.mkdir()
    program.write_text(HELPER.format(asked=home / "asked"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    log_in(home, credsStore="chain", credHelpers={"gone.example.com": "gone"}, auths={"none.example.com": password()})
    assert find_login("registry.example.com") == Login("bob", "hidden")
    assert find_login("token.example.com") == Login("", "", "t")
    assert find_login("none.example.com") == Login("ann", "pass:word")
    assert find_login("docker.io") == Login("bob", "hidden")
    assert (home / "asked").read_text().split()[-1] == "https://index.docker.io/v1/"
    with pytest.raises(
        ClientError, match=r"docker-credential-gone, the credential helper for .* failed: FileNotFoundError"
    ):
        find_login("gone.example.com")
    with pytest.raises(ClientError, match=r"docker-credential-chain.*no keychain"):
        find_login("broken.example.com")
    with pytest.raises(ClientError, match="KeyError: 'Username'"):
        find_login("odd.example.com")


def test_docker_config_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_login("registry.example.com") is None
    log_in(home, auths={"https://index.docker.io/v1/": password(), "registry.example.com": {}})
    assert find_login("docker.io") == Login("ann", "pass:word")
    assert find_login("registry.example.com") is None
    (home / ".docker" / "config.json").write_text('{"auths": [1]}')
    with pytest.raises(ClientError, match=r"config\.json is invalid .*`docker login registry.example.com"):
        find_login("registry.example.com")
    monkeypatch.setenv("DOCKER_CONFIG", str(home / "elsewhere"))
    assert find_login("registry.example.com") is None


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"auth": "bearer"}, {}, r"no such user \(HTTP status 401\); log in with `docker login 127"),
        ({"auth": "basic"}, {}, "log in with `docker login 127"),
        (
            {"auth": "bearer"},
            {"login": ("ann", "old")},
            "no such user .*; the login is invalid: run `docker login 127",
        ),
        ({"auth": "basic"}, {"login": ("ann", "old")}, "the login is invalid: run `docker login 127"),
        ({"auth": "basic"}, {"token": "kept"}, "the login is invalid: run `docker login 127"),
        (
            {"auth": "bearer", "may_push": False},
            {"login": ("ann", "pass:word")},
            "refuses team/code: HTTP status 403; ask for the permission to push there",
        ),
        (
            {"answers": {"POST": (404, b'{"errors": [{"message": "repository does not exist"}]}')}},
            {},
            r"repository does not exist \(HTTP status 404\); check the repository's name",
        ),
        ({"answers": {"PUT": (413, b"<html>")}}, {}, "HTTP status 413; the upload is too large"),
        ({"answers": {"POST": (307, b"")}}, {}, "HTTP status 307; check that the registry accepts OCI images"),
        ({"answers": {"PUT": (503, b"[]")}}, {}, "HTTP status 503; try again later"),
    ],
)
def test_refusal_has_registry_message_and_remedy(
    tmp_path: Path, home: Path, registry: Registry, changes: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    for name, value in changes.items():
        setattr(registry, name, value)
    if "login" in config:
        log_in(home, auths={registry.host: password(config["login"])})
    if "token" in config:
        log_in(home, auths={registry.host: {"identitytoken": config["token"]}})
    with pytest.raises(ClientError, match=message) as refusal:
        push_image(image(tmp_path, f"{registry.host}/team/code"))
    assert str(refusal.value).startswith(f"--code-image: the registry {registry.host} refuses team/code: ")
    assert registry.pushed() == 0


def test_token_without_push_permission_is_reported(tmp_path: Path, home: Path, registry: Registry) -> None:
    registry.auth = "bearer"
    registry.answers = {"POST": (401, b'{"errors": [{"message": "authentication required"}]}')}
    log_in(home, auths={registry.host: password()})
    with pytest.raises(ClientError, match=r"authentication required .*; ask for the permission to push there"):
        push_image(image(tmp_path, f"{registry.host}/team/code"))


def test_unreachable_registry_is_reported(tmp_path: Path, registry: Registry) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(
        ClientError, match=f"cannot connect to the registry {host} .Connection refused.; check its name"
    ):
        push_image(image(tmp_path, f"{host}/team/code"))
    port = registry.host.partition(":")[2]
    # No loopback name in our list, but one to the system.
    with pytest.raises(ClientError, match=r"cannot connect to the registry \S+ \(.*; set SSL_CERT_FILE .* http://"):
        push_image(image(tmp_path, f"127.1:{port}/team/code"))
    assert registry.calls == []
    push_image(image(tmp_path, f"http://127.1:{port}/team/code"))
    assert registry.pushed() == 6


@pytest.mark.parametrize(
    "name",
    ["team/code", "code", "example.com", "example.com/Code", "example.com/a//b", "ftp://a.b/c", "a.b/c@sha256:1"],
)
def test_name_that_is_no_repository_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotPack, match=f"--code-image {name}: not a repository"):
        image(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("localhost:5000/code", True),
        ("127.0.0.1/code", True),
        ("[::1]:5000/code", True),
        ("https://localhost:5000/code", False),
        ("http://registry:5000/code", True),
        ("registry:5000/code", False),
        ("localhost.example.com/code", False),
    ],
)
def test_plain_http_is_used_only_for_loopback_and_named_registries(tmp_path: Path, name: str, plain: bool) -> None:
    assert image(tmp_path, name).plain is plain


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("http://registry:5000/a_b/c--d.e__f:1.0", "registry:5000/a_b/c--d.e__f@"),
        ("[::1]:5000/code", "[::1]:5000/code@"),
        ("docker.io/ann/code", "docker.io/ann/code@"),
    ],
)
def test_pods_get_repository_by_digest(tmp_path: Path, name: str, reference: str) -> None:
    assert image(tmp_path, name).reference.startswith(f"{reference}sha256:")


def test_user_without_home_folder_has_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_user(monkeypatch)
    assert find_login("registry.example.com") is None
