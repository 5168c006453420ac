"""An archive as an OCI image of one layer, whose only file it is: what a registry is given, and pods mount."""

import hashlib
import io
import ipaddress
import json
import re
import tarfile
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ddp_operator import constants
from ddp_operator.code.archive import Archive
from ddp_operator.code.files import CannotPack

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
# A node unpacks an image of its own architecture only, though nothing in this one is of any.
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
    """What is pushed where: ``blobs`` and ``manifests`` by digest, then the index with the tag."""

    host: str
    plain: bool
    """Whether the registry is spoken to without TLS: it is on this machine, or its name was given with http://."""
    repository: str
    tag: str
    blobs: dict[str, bytes]
    manifests: dict[str, bytes]
    index: bytes

    @property
    def digest(self) -> str:
        """The index's."""
        return digest_of(self.index)

    @property
    def reference(self) -> str:
        """What the pods pull, whatever the tag says later."""
        return f"{self.host}/{self.repository}@{self.digest}"


def digest_of(data: bytes) -> str:
    """Return the digest by which a registry knows the bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def build_image(name: str, archive: Archive) -> Image:
    """Return the image for a repository such as registry.example.com/team/code, with a tag or without.

    The same archive makes the same image. Raises: CannotPack.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CannotPack(
            f"--code-image {name}: is no repository of a registry; write it with its host, in small letters, such as "
            "registry.example.com/team/code, and a tag if you want one (code:mine)"
        )
    layer = _build_layer(archive.data)
    blobs, manifests, entries = {digest_of(layer): layer}, {}, []
    for architecture in _ARCHITECTURES:
        platform = {"architecture": architecture, "os": "linux"}
        config = _encode(platform | {"config": {}, "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}})
        blobs[digest_of(config)] = config
        parts = {"config": _describe(_CONFIG, config), "layers": [_describe(_LAYER, layer)]}
        manifest = _encode({"schemaVersion": 2, "mediaType": MANIFEST, **parts})
        manifests[digest_of(manifest)] = manifest
        entries.append(_describe(MANIFEST, manifest) | {"platform": platform})
    index = _encode({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
    # Never that of another image, which a registry might clear away once it has lost its tag.
    tag = match["tag"] or hashlib.sha256(index).hexdigest()[:12]
    plain = match["scheme"] == "http://" or (match["scheme"] is None and is_loopback(match["host"]))
    return Image(match["host"], plain, match["repository"], tag, blobs, manifests, index)


def _build_layer(data: bytes) -> bytes:
    """Return a tar with the archive as it is, and no time or owner."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo(constants.CODE_FILE)
        entry.size, entry.mode = len(data), 0o444
        tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def _describe(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def is_loopback(host: str) -> bool:
    """Tell whether a host, with a port or without, is this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
