"""`ddp mcp` as an assistant uses it: the client of the package `mcp` over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli.features.mcp.tools import READ_TOOLS
from ddp_operator.api.constants import KIND
from tests.support.builders import job_manifest
from tests.support.ddp_run import DdpRun, manifest
from tests.support.running_operator import Start
from tests.support.standin import ClusterActors, StandIn

mcp = pytest.importorskip("mcp", reason="the package mcp is not installed (the extra mcp; make install has it)")

READ_NAMES = [tool.name for tool in READ_TOOLS]
SAYS_HELLO = "import os; print('hello of', os.environ['RANK'], flush=True)"


@asynccontextmanager
async def assistant(folder: Path, *options: str) -> AsyncIterator[Any]:
    """Start `ddp mcp` in a folder and connect the package's client to it."""
    from mcp.client.stdio import stdio_client

    parameters = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "ddp_cli", "mcp", *options],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(folder)},
        cwd=folder,
    )
    async with mcp.Client(stdio_client(parameters)) as client:
        yield client


async def call(client: Any, tool: str, **arguments: Any) -> str:
    """Return the text of a tool's result."""
    result = await client.call_tool(tool, arguments)
    (content,) = result.content
    assert not result.is_error, content.text
    return str(content.text)


async def refuse(client: Any, tool: str, **arguments: Any) -> str:
    """Return the text of a tool's error."""
    result = await client.call_tool(tool, arguments)
    (content,) = result.content
    assert result.is_error, content.text
    return str(content.text)


@pytest.mark.process
async def test_read_tools_describe_a_run_of_this_machine(tmp_path: Path) -> None:
    text = manifest([sys.executable, "-c", SAYS_HELLO], nodes=1)
    with DdpRun(tmp_path, text, ["--plain"]) as run:
        assert run.wait() == 0, run.output
    name = run.run_folder.name
    async with assistant(tmp_path, "--local") as client:
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == READ_NAMES
        assert all(tool.annotations.read_only_hint and tool.description for tool in listed)
        assert f"{name}   Succeeded" in await call(client, "list")
        shown = yaml.safe_load(await call(client, "status", name="toy"))
        assert (shown["metadata"]["name"], shown["status"]["phase"]) == (name, "Succeeded")
        assert "Succeeded with a warning after" in await call(client, "why", name="toy")
        assert "[rank 0] hello of 0" in await call(client, "logs", name=name, lines=20)
        assert await call(client, "usage") == "no job has used a GPU"
        kinds = [resource["kind"] for resource in yaml.safe_load_all(await call(client, "render", manifest=text))]
        assert "Job" in kinds

        assert "is not a name" in await refuse(client, "status", name="../../etc")
        assert "run other does not exist" in await refuse(client, "why", name="other")
        assert "not valid YAML" in await refuse(client, "render", manifest="a: [")
        assert await refuse(client, "delete", name=name) == "Unknown tool: delete"
    assert run.run_folder.is_dir()


async def test_ctrl_c_ends_a_server_that_waits_for_input(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ddp_cli", "mcp", "--local"),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    parameters = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": parameters}
    try:
        server.stdin.write(json.dumps(message).encode() + b"\n")
        assert b'"result"' in await server.stdout.readline()
        server.send_signal(signal.SIGINT)
        assert await server.wait() == -signal.SIGINT
    finally:
        with suppress(ProcessLookupError):
            server.kill()


async def use_every_tool(client: Any, actors: ClusterActors, write_log: Any) -> None:
    """Submit a job, read about it, change it and delete it."""
    submitted = await call(client, "submit", manifest=yaml.safe_dump(job_manifest()))
    assert submitted.startswith("digits: submitted to namespace")
    job = await actors.resource("digits", lambda found: found.get("status", {}).get("jobName"))
    assert "digits" in await call(client, "list")
    assert "digits" in await call(client, "list", all_namespaces=True)
    conditions = yaml.safe_load(await call(client, "status", name="digits"))["status"]["conditions"]
    assert "Accepted" in {condition["type"] for condition in conditions}
    assert "digits" in await call(client, "why", name="digits")
    assert await call(client, "usage", all_namespaces=True) == "no job has used a GPU"
    await write_log(job["status"]["jobName"])

    await call(client, "scale", name="digits", nodes=1)
    await actors.resource("digits", lambda found: found["spec"]["nodes"] == 1)
    await call(client, "suspend", name="digits")
    await actors.phase("digits", "Suspended")
    await call(client, "resume", name="digits")
    await actors.resource("digits", lambda found: not found["spec"]["suspend"])
    assert "already exists" in await refuse(client, "submit", manifest=yaml.safe_dump(job_manifest()))
    assert await call(client, "delete", name="digits") == "digits: deleted"
    assert await actors.get(KIND, "digits") is None
    assert 'job "digits" does not exist' in await refuse(client, "why", name="digits")


async def test_every_tool_works_with_a_cluster(
    kubeconfig: Path, server: StandIn, actors: ClusterActors, start: Start, tmp_path: Path
) -> None:
    start()
    async with assistant(tmp_path, "--kubeconfig", str(kubeconfig), "--allow-writes") as client:

        async def write_log(job: str) -> None:
            pod = await actors.run_pod(job, 0)
            server.write_log(pod["metadata"]["name"], "2026-01-01T00:00:01Z loss 0.5", "2026-01-01T00:00:02Z loss 0.4")
            assert "[rank 0] loss 0.4" in await call(client, "logs", name="digits", lines=10)

        await use_every_tool(client, actors, write_log)
