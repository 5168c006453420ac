"""Build an OCI image whose only file is an archive, for a registry and for pods that mount it."""

import hashlib
import io
import ipaddress
import json
import re
import tarfile
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ddp_cli.client.packing.archive import Archive
from ddp_cli.client.packing.files import CannotPack
from ddp_operator.api import constants

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
# A node accepts only images for its architecture, although this image contains no program.
_ARCHITECTURES: Final = ("amd64", "arm64")
_PART: Final = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_NAME: Final = re.compile(
    r"(?P<scheme>https?://)?"
    r"(?P<host>(?:localhost|\[[0-9a-f:]+\]|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:\d))(?::\d+)?)/"
    rf"(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Image:
    """An image and its repository: ``blobs`` and ``manifests`` by digest, and the index, which gets the tag."""

    host: str
    plain: bool
    """Whether the connection uses no TLS: the registry is on this machine, or its name starts with http://."""
    repository: str
    tag: str
    blobs: dict[str, bytes]
    manifests: dict[str, bytes]
    index: bytes

    @property
    def digest(self) -> str:
        """The digest of the index."""
        return digest_of(self.index)

    @property
    def reference(self) -> str:
        """The reference that the pods pull; it does not depend on the tag."""
        return f"{self.host}/{self.repository}@{self.digest}"


def digest_of(data: bytes) -> str:
    """Return the OCI digest of the bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def build_image(name: str, archive: Archive) -> Image:
    """Return the image for a repository such as registry.example.com/team/code, with or without a tag.

    The same archive always gives the same image. Raises: CannotPack.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CannotPack(
            f"--code-image {name}: not a repository; write host and path in lower case, such as "
            "registry.example.com/team/code, with an optional tag (code:mine)"
        )
    layer = _build_layer(archive.data)
    blobs = {digest_of(layer): layer}
    manifests = {}
    entries = []
    for architecture in _ARCHITECTURES:
        platform = {"architecture": architecture, "os": "linux"}
        config = _encode(platform | {"config": {}, "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}})
        blobs[digest_of(config)] = config
        parts = {"config": _describe(_CONFIG, config), "layers": [_describe(_LAYER, layer)]}
        manifest = _encode({"schemaVersion": 2, "mediaType": MANIFEST, **parts})
        manifests[digest_of(manifest)] = manifest
        entries.append(_describe(MANIFEST, manifest) | {"platform": platform})
    index = _encode({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    # A unique default tag: a registry may delete an image whose tag has moved to another.
    tag = match["tag"] or hashlib.sha256(index).hexdigest()[:12]
    plain = match["scheme"] == "http://" or (match["scheme"] is None and is_loopback(match["host"]))
    return Image(match["host"], plain, match["repository"], tag, blobs, manifests, index)


def _build_layer(data: bytes) -> bytes:
    """Return a tar that contains the archive, without time and owner."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo(constants.CODE_FILE)
        entry.size = len(data)
        entry.mode = 0o444
        tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def _describe(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
