"""Limit custom resources in responses of the API server before they are decoded.

Anyone who may create a job may store 1.5 MB in it. Decoded, many small values take 45 times their size. A resource that
is too large therefore gets a short spec that only has the reason, and the spec of a large one can stay text. Kopf's
connection limits its responses before Kopf decodes them.
"""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

import aiohttp
import kopf
import msgspec

from ddp_operator.api.constants import KIND
from ddp_operator.api.errors import FieldError
from ddp_operator.api.faults import parse_each
from ddp_operator.api.size import MAX_BYTES, MAX_VALUES, OVERSIZE, REMEDY, OversizeSpec, limit_nesting, refuse_oversize
from ddp_operator.kube.children import trim_metadata

LARGE: Final = 16 << 10
"""Bytes from which a resource is limited."""
_MOST_COUNTED: Final = 100_000
"""Values up to which the largest part of a spec is searched. More would take too much memory."""
_MAX_KEPT: Final = 1024
"""Maximum bytes of a member of a spec that is too large: its checkpoint, its profile and so on."""

Members = dict[str, msgspec.Raw]


class _Identity(msgspec.Struct):
    """The metadata by which caches recognize an object. Kopf exits without them."""

    name: str
    namespace: str
    uid: str
    resource_version: str = msgspec.field(name="resourceVersion")


class _Identified(msgspec.Struct):
    metadata: _Identity


def limit_response(raw: bytes, *, specs_as_text: bool = False) -> bytes:
    """Return a response in which each resource is limited: the object itself, items of a list, or that of an event."""
    return bytes(_limit(limit_nesting(raw), specs_as_text=specs_as_text))


def _limit(raw: bytes | msgspec.Raw, *, specs_as_text: bool) -> msgspec.Raw:
    raw = bytes(raw)
    try:
        members = msgspec.json.decode(raw, type=Members) if len(raw) > LARGE else {}
    except msgspec.DecodeError:  # no object, or a part of one
        members = {}
    kind = bytes(members.get("kind", b""))
    if "object" in members:
        members["object"] = _limit(members["object"], specs_as_text=specs_as_text)
    elif kind == b'"%sList"' % KIND.encode():
        items = msgspec.json.decode(members["items"], type=list[msgspec.Raw])
        limited = [bytes(item) for item in parse_each(KIND, items, partial(_limit, specs_as_text=specs_as_text))]
        members["items"] = msgspec.Raw(b"[%s]" % b",".join(limited))
    elif kind == b'"%s"' % KIND.encode():
        members["metadata"] = _limit_metadata(members["metadata"])
        spec = _limit_spec(bytes(members.get("spec", b"null")))
        members["spec"] = msgspec.Raw(msgspec.json.encode(spec.decode()) if specs_as_text else spec)
    else:
        return msgspec.Raw(raw)
    return msgspec.Raw(msgspec.json.encode(members))


def _limit_metadata(raw: msgspec.Raw) -> msgspec.Raw:
    members = msgspec.json.decode(raw, type=Members)
    members.pop("managedFields", None)
    metadata: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(members))
    return msgspec.Raw(msgspec.json.encode(trim_metadata(KIND, metadata)))


def _limit_spec(raw: bytes) -> bytes:
    """Return a spec or, if it exceeds a limit, its small members and the reason."""
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if len(raw) <= MAX_BYTES and values <= MAX_VALUES:
        return raw
    try:
        if len(raw) > MAX_BYTES and values > _MOST_COUNTED:
            size = f"has {len(raw) >> 10} KiB as JSON, and the limit is {MAX_BYTES >> 10} KiB"
            raise OversizeSpec([FieldError("spec", f"{size}; {REMEDY}")])
        refuse_oversize(msgspec.json.decode(raw))
    except OversizeSpec as error:
        members = msgspec.json.decode(raw, type=Members)
        kept: dict[str, Any] = {name: value for name, value in members.items() if len(bytes(value)) <= _MAX_KEPT}
        [reason] = error.errors
        return msgspec.json.encode(kept | {OVERSIZE: [reason.path, reason.message]})
    return raw


def check_identity(item: Any) -> Any:
    """Return an object with the metadata that identify it. Raises: msgspec.ValidationError."""
    msgspec.convert(item, _Identified)
    return item


def open_kopf_session(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """Return the session that Kopf would open with these credentials, but with limited responses."""
    return kopf.AiohttpSession(
        server=info.server,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
        aiohttp_session=aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
            headers=info.as_http_headers(),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            response_class=_LimitedResponse,
        ),
    )


class _LimitedResponse(aiohttp.ClientResponse):
    """A response whose body, and each line of which, is limited."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the headers."""
        await super().start(connection)
        self.content = _LimitedLines(self.content)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        """Return the decoded body, without items that Kopf could not identify."""
        answer = json.loads(limit_response(await self.read(), specs_as_text=True))
        if isinstance(answer, dict) and isinstance(answer.get("items"), list):
            answer["items"] = list(parse_each(KIND, answer["items"], check_identity))
        return answer


class _LimitedLines:
    """The stream of a response: ``iter_chunked`` yields whole lines."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield the lines of a watch. ``size``: the maximum bytes of a read."""
        rest = bytearray()
        async for chunk in self._stream.iter_chunked(size):
            rest += chunk
            if b"\n" not in chunk:
                continue
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for limited in parse_each(KIND, lines, _limit_line):
                yield limited + b"\n"
        if rest:
            yield limit_response(bytes(rest), specs_as_text=True)


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


def _limit_line(line: bytes) -> bytes:
    """Return a limited line of a watch. Raises: msgspec.DecodeError if Kopf could not identify its resource."""
    limited = limit_response(line, specs_as_text=True)
    event = msgspec.json.decode(limited, type=_Line)
    if event.type not in ("BOOKMARK", "ERROR"):
        msgspec.json.decode(event.object, type=_Identified)
    return limited
