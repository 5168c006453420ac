"""A folder as an image in a common registry (Debian's docker-registry): with a password, and with TLS."""

from __future__ import annotations

import base64
import io
import json
import shutil
import ssl
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.client.errors import ClientError
from ddp_cli.client.packing.image import Image
from ddp_cli.client.packing.packed import PackedCode, pack_code
from ddp_cli.client.registry import push_image
from tests.support.control_plane import free_ports

_ACCEPT = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json"
# The output of `htpasswd -nbB ann secret`.
_USERS = "ann:$2b$05$6xMa69fzlyfGUg5l7r4Lz.i1URSTdVHxYkEk0Td7cQ9AdM5OykIXa"


def start_registry(folder: Path, **http: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start a registry with a password at a port of this machine. Return the process and its host."""
    host = f"localhost:{free_ports(1)[0]}"
    (folder / "users").write_text(_USERS + "\n")
    config = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "images")}},
        "auth": {"htpasswd": {"realm": "here", "path": str(folder / "users")}},
        "http": {"addr": host, **http},
    }
    (folder / "registry.yml").write_text(json.dumps(config))
    with (folder / "registry.log").open("wb") as log:
        words = [str(shutil.which("docker-registry")), "serve", str(folder / "registry.yml")]
        return subprocess.Popen(words, stdout=log, stderr=log), host


Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts registries; the user ann has logged in to the first one."""
    if shutil.which("docker-registry") is None:
        pytest.skip("there is no docker-registry (of Debian's package of that name)")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    running = []

    def start(**http: Any) -> str:
        process, host = start_registry(tmp_path, **http)
        running.append(process)
        auth = base64.b64encode(b"ann:secret").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        return host

    yield start
    for process in running:
        process.kill()
        process.wait()


def pack(tmp_path: Path, name: str) -> tuple[PackedCode, Image]:
    (tmp_path / "source").mkdir(exist_ok=True)
    (tmp_path / "source" / "train.py").write_text("print('here')\n")
    (tmp_path / "source" / "data.bin").write_bytes(bytes(range(256)) * 20_000)
    code = pack_code(tmp_path / "source", image=name)
    assert code.image is not None
    return code, code.image


def push(image: Image) -> str:
    """Push, as soon as the registry listens."""
    until = time.monotonic() + 30
    while True:
        try:
            return push_image(image)
        except ClientError as error:
            if "Connection refused" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.05)


def pull(address: str, content: str, context: ssl.SSLContext | None = None) -> bytes:
    """Return a blob or manifest as another client reads it."""
    headers = {"Accept": _ACCEPT, "Authorization": "Basic " + base64.b64encode(b"ann:secret").decode()}
    request = urllib.request.Request(f"{address}/v2/team/code/{content}", headers=headers)
    with urllib.request.urlopen(request, context=context) as response:
        return bytes(response.read())


def pull_archive(address: str, digest: str, context: ssl.SSLContext | None = None) -> bytes:
    """Return the archive as a node's container runtime finds it."""
    index = json.loads(pull(address, f"manifests/{digest}", context))
    manifest = json.loads(pull(address, f"manifests/{index['manifests'][0]['digest']}", context))
    layer = pull(address, f"blobs/{manifest['layers'][0]['digest']}", context)
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        file = tar.extractfile("code.tar.gz")
        assert file is not None
        return file.read()


def test_folder_is_pushed_with_password(start: Start, tmp_path: Path) -> None:
    host = start()
    code, image = pack(tmp_path, f"{host}/team/code:mine")
    assert push(image) == f"pushed as {host}/team/code:mine"
    assert pull_archive(f"http://{host}", image.digest) == code.archive.data
    assert push(image) == f"{host}/team/code:mine already exists"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ClientError, match=f"run `docker login {host}`"):
        push(image)


def test_folder_is_pushed_by_tls(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "tls.key"
    certificate = tmp_path / "tls.crt"
    made = (
        f"-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -out {certificate} -subj /CN=localhost"
    )
    words = ["openssl", "req", "-x509", *made.split(), "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(words, check=True, capture_output=True)
    host = start(tls={"certificate": str(certificate), "key": str(key)})
    code, image = pack(tmp_path, f"https://{host}/team/code")
    with pytest.raises(ClientError, match=r"self-signed certificate.*SSL_CERT_FILE"):
        push(image)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    push(image)
    context = ssl.create_default_context(cafile=str(certificate))
    assert pull_archive(f"https://{host}", image.digest, context) == code.archive.data
