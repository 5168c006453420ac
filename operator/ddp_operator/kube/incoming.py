"""Limit custom resources in responses of the API server before they are decoded.

Anyone who may create a job may store 1.5 MB in it, with lists in 10,000 levels. Decoded, many small values take 45
times their size. Responses are therefore split into members without decoding these, in linear time. A resource that is
too large gets a short spec that only has the reason. Kopf's connection limits its responses before Kopf decodes them;
there a large spec also becomes a short one, and the pass reads it, because Kopf keeps the events of many jobs at once.

The loop has a turn between two resources, so that a page of large ones does not delay the Lease and the probes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

import aiohttp
import kopf
import msgspec

from ddp_operator.api.constants import GROUP, KIND
from ddp_operator.api.errors import FieldError
from ddp_operator.api.faults import contain, name_object, parse_each
from ddp_operator.api.nesting import limit_nesting, measure_depth
from ddp_operator.api.size import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    OVERSIZE,
    REMEDY,
    TOO_DEEP,
    OversizeSpec,
    refuse_oversize,
)
from ddp_operator.kube.children import trim_metadata

OMITTED: Final = "$omitted"
"""Member of a spec of which the cache keeps only the small members: the spec is read when it is needed."""
LARGE: Final = 16 << 10
"""Bytes from which a resource is limited."""
_MOST_COUNTED: Final = 2 * MAX_VALUES
"""Values up to which the largest part of an oversize spec is searched."""
_MAX_KEPT: Final = 1024
"""Maximum bytes of a small member of a spec: its checkpoint, its profile and so on."""
_API_LEVELS: Final = 10_100
"""Levels of lists and objects in a response: the API server stores 10,000."""

Members = dict[str, msgspec.Raw]
T = TypeVar("T")


class _Identity(msgspec.Struct):
    """The metadata by which caches recognize an object. Kopf exits without them."""

    name: str
    namespace: str
    uid: str
    resource_version: str = msgspec.field(name="resourceVersion")


class _Identified(msgspec.Struct):
    metadata: _Identity


class _Resource(msgspec.Struct, rename="camel", omit_defaults=True):
    """A custom resource; the API server stores no other members. One scan of the text splits it and its spec."""

    api_version: msgspec.Raw
    kind: msgspec.Raw
    metadata: msgspec.Raw
    spec: Members
    status: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Event(msgspec.Struct):
    type: msgspec.Raw
    object: _Resource


async def limit_response(raw: bytes, *, brief: bool = False) -> bytes:
    """Return a response in which each resource is limited: the object itself, or the items of a list.

    ``brief``: a large spec has only its small members.
    """
    if len(raw) <= LARGE:
        return limit_nesting(raw)
    members = await _split(raw, Members)
    if members is None:
        return limit_nesting(raw)
    if "items" in members:
        items = await _split(members["items"], list[msgspec.Raw]) or []
        limited: list[bytes] = []
        for item in items:
            with contain(KIND, name_object(item)):
                limited.append(await _limit_item(item, brief=brief))
        members["items"] = msgspec.Raw(b"[%s]" % b",".join(limited))
    else:
        _limit_members(members, brief=brief)
    return msgspec.json.encode(members)


async def limit_event(raw: bytes, *, brief: bool = False) -> bytes:
    """Return a line of a watch in which the resource is limited."""
    if len(raw) <= LARGE:
        return limit_nesting(raw)
    event = await _split(raw, _Event)
    if event is None:
        return limit_nesting(raw)
    resource = event.object
    resource.metadata = _limit_metadata(resource.metadata, bytes(resource.kind))
    resource.spec = _limit_spec(resource.spec, brief=brief)
    if isinstance(resource.status, msgspec.Raw):
        resource.status = msgspec.Raw(limit_nesting(bytes(resource.status)))
    await asyncio.sleep(0)
    return msgspec.json.encode(event)


async def _limit_item(raw: msgspec.Raw, *, brief: bool) -> bytes:
    """Return a limited item of a list. ``raw``: a part of the response, which is not copied."""
    if len(memoryview(raw)) <= LARGE:
        return limit_nesting(bytes(raw))
    await asyncio.sleep(0)
    members = await _split(raw, Members)
    if members is None:
        return limit_nesting(bytes(raw))
    _limit_members(members, brief=brief)
    return msgspec.json.encode(members)


async def _split(raw: bytes | msgspec.Raw, shape: type[T]) -> T | None:
    """Return the parts of JSON without decoding these. None: it is no JSON of this shape."""
    try:
        try:
            return _decode_parts(raw, shape)
        except RecursionError:
            # Python 3.12 and 3.13 have a limit of their own, just below that of the API server.
            return _decode_parts(await asyncio.to_thread(limit_nesting, bytes(raw)), shape)
    except msgspec.DecodeError:
        return None


def _decode_parts(raw: bytes | msgspec.Raw, shape: type[T]) -> T:
    """Return the parts of JSON; msgspec recurses to skip them. Raises: DecodeError, RecursionError."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + _API_LEVELS)
    try:
        return msgspec.json.decode(raw, type=shape)
    finally:
        sys.setrecursionlimit(limit)


def _limit_members(members: Members, *, brief: bool) -> None:
    """Limit the members of one resource. Objects of other groups are unchanged."""
    if "metadata" in members:
        members["metadata"] = _limit_metadata(members["metadata"], bytes(members.get("kind", b"")))
    if not bytes(members.get("apiVersion", b"")).startswith(b'"%s/' % GROUP.encode()):
        return
    if "spec" in members:
        is_job = bytes(members.get("kind", b"")) == b'"%s"' % KIND.encode()
        spec = _limit_spec(_decode_parts(members["spec"], Members), brief=brief and is_job)
        members["spec"] = msgspec.Raw(msgspec.json.encode(spec))
    if "status" in members:
        members["status"] = msgspec.Raw(limit_nesting(bytes(members["status"])))


def _limit_metadata(raw: msgspec.Raw, kind: bytes) -> msgspec.Raw:
    members = _decode_parts(raw, Members)
    members.pop("managedFields", None)
    if kind != b'"%s"' % KIND.encode():
        return msgspec.Raw(msgspec.json.encode(members))
    metadata: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(members))
    return msgspec.Raw(msgspec.json.encode(trim_metadata(KIND, metadata)))


def _limit_spec(spec: Members, *, brief: bool) -> Members:
    """Return a spec or, if it exceeds a limit, its small members and the reason.

    ``brief``: of a large one the small members only.
    """
    size = brackets = 0
    values = len(spec)
    for name, part in spec.items():
        text = bytes(part)
        size += len(name) + len(text)
        opened = text.count(b"[") + text.count(b"{")
        brackets += opened
        values += opened + text.count(b",")
    try:
        if size > MAX_BYTES and values > _MOST_COUNTED:
            message = f"has {size >> 10} KiB as JSON, and the limit is {MAX_BYTES >> 10} KiB; {REMEDY}"
            raise OversizeSpec([FieldError("spec", message)])
        if brackets >= MAX_DEPTH and any(measure_depth(bytes(part)) >= MAX_DEPTH for part in spec.values()):
            raise OversizeSpec([FieldError("spec", TOO_DEEP)])
        if size > MAX_BYTES or values > MAX_VALUES:
            refuse_oversize(msgspec.json.decode(msgspec.json.encode(spec)))
    except OversizeSpec as error:
        [reason] = error.errors
        return _select_small(spec, OVERSIZE, [reason.path, reason.message])
    return _select_small(spec, OMITTED, True) if brief and size > LARGE else spec


def omit_large(spec: bytes) -> bytes:
    """Return a spec with its small members only."""
    return msgspec.json.encode(_select_small(_decode_parts(spec, Members), OMITTED, True))


def _select_small(spec: Members, mark: str, value: Any) -> Members:
    """Return the small members of a spec, and a member that states what happened to the others."""
    small = {name: limit_nesting(bytes(part)) for name, part in spec.items() if len(memoryview(part)) <= _MAX_KEPT}
    return {name: msgspec.Raw(part) for name, part in (small | {mark: msgspec.json.encode(value)}).items()}


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
        answer = json.loads(await limit_response(await self.read(), brief=True))
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
        parts: list[bytes] = []  # of the line that has not ended; each copy of a long one takes a millisecond
        async for chunk in self._stream.iter_chunked(size):
            *ends, start = chunk.split(b"\n")
            for end in ends:
                line = b"".join([*parts, end])
                parts.clear()
                limited: list[bytes] = []
                with contain(KIND, name_object(line)):
                    limited.append(await _limit_line(line))
                for text in limited:
                    yield text + b"\n"
            parts.append(start)
        rest = b"".join(parts)
        if rest:
            yield await limit_event(rest, brief=True)


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


async def _limit_line(line: bytes) -> bytes:
    """Return a limited line of a watch. Raises: msgspec.DecodeError if Kopf could not identify its resource."""
    limited = await limit_event(line, brief=True)
    event = msgspec.json.decode(limited, type=_Line)
    if event.type not in ("BOOKMARK", "ERROR"):
        msgspec.json.decode(event.object, type=_Identified)
    return limited
