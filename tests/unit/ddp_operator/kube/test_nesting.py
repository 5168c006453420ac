"""JSON of the API server that is nested deeper than decoders and copies of an object can follow."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
import pytest_asyncio
from aiohttp import web

from ddp_operator.api.constants import GROUP
from ddp_operator.api.nesting import limit_nesting
from ddp_operator.kube.client import ApiClient
from ddp_operator.kube.incoming import open_kopf_session

DEEP = 20_000
LISTS = "[" * DEEP + "]" * DEEP
MAPS = '{"a":' * DEEP + "1" + "}" * DEEP


def find_depth(value: Any) -> int:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(find_depth, members)) if members else 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, {"b": []}]}', {"a": [1, {"b": []}]}),
        (json.dumps(["[{" * 200, '"]}' * 200, "\\"]), ["[{" * 200, '"]}' * 200, "\\"]),
        (json.dumps([[1], {"a": 2}] * 200), [[1], {"a": 2}] * 200),
        ('[{"x": ' + '[1, "]",' * 79 + "[2]" + "]" * 79 + '}, "kept"]', ...),
    ],
)
def test_json_with_few_levels_is_unchanged(text: str, expected: Any) -> None:
    limited = limit_nesting(text.encode())
    value = json.loads(limited)
    if expected is ...:
        assert (find_depth(value) <= 80, value[1]) == (True, "kept")
    else:
        assert value == expected


@pytest.mark.parametrize("nested", [LISTS, MAPS, '[{"b": "]}", "a": ' * DEEP + '"\\""' + ', "c": {}}, 3]' * DEEP])
def test_deeper_levels_become_null(nested: str) -> None:
    limited = json.loads(limit_nesting(f'{{"metadata": {{"name": "x"}}, "a": {nested}, "z": [1]}}'.encode()))
    assert limited["metadata"] == {"name": "x"}
    assert limited["z"] == [1]
    assert find_depth(limited) == 80


@pytest_asyncio.fixture
async def server() -> AsyncIterator[str]:
    """A server whose answers are nested."""
    identity = '"metadata": {"name": "x", "namespace": "y", "uid": "u", "resourceVersion": "1"}'
    event = f'{{"type": "ADDED", "object": {{{identity}, "a": {LISTS}}}}}\n'
    item = f'{{{identity}, "a": {MAPS}}}'

    async def answer(request: web.Request) -> web.Response:
        text = event * 2 if "watch" in request.query else f'{{"items": [{item}]}}'
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_kopf_decodes_nested_lists_and_events(server: str) -> None:
    opened = open_kopf_session(kopf.ConnectionInfo(server=server))
    async with opened.aiohttp_session as session:
        async with session.get(f"{server}/x") as response:
            assert find_depth(await response.json()) == 80
        async with session.get(f"{server}/x?watch=true") as response:
            events = b"".join([chunk async for chunk in response.content.iter_chunked(1000)]).splitlines()
    assert [json.loads(event)["type"] for event in events] == ["ADDED", "ADDED"]


async def test_client_decodes_nested_custom_resource(server: str) -> None:
    async def log_in() -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=server)

    client = ApiClient(log_in)
    assert find_depth(await client.request("GET", f"/apis/{GROUP}/v1alpha1/ddptrainingjobs")) == 80
    await client.close()
