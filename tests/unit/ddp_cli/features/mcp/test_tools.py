"""The tools of `ddp mcp`, without the protocol: results, limits and refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.client.client import Client
from ddp_cli.client.errors import ClientError
from ddp_cli.client.logs import Line, LogPod
from ddp_cli.commands.io import ExitCode
from ddp_cli.features.mcp import command as mcp
from ddp_cli.features.mcp import tools as mcp_tools
from ddp_cli.features.mcp.tools import LIST_ROWS, LOG_LINES, LOG_PODS, OUTPUT_BYTES, READ_TOOLS, WRITE_TOOLS, JobTools
from tests.support.builders import resource
from tests.support.fake_backend import FakeBackend

JOB = resource("x", nodes=2) | {"status": {"phase": "Running", "reason": "Training", "points": ["time,step"]}}


class ManyPodsBackend(FakeBackend):
    """A job whose pods each have this many lines."""

    def __init__(self, pods: int, lines: int, text: str = "line") -> None:
        super().__init__(JOB)
        self._pods = pods
        self._text = text
        self._written = lines
        self.tail: int | None = None

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> ManyPodsBackend:
        self.tail = tail
        return self

    def pods(self) -> list[LogPod]:
        return [LogPod(f"x-2-{node}", "trainer", 2, node, 1) for node in range(self._pods)] + [
            LogPod("x-1-0", "trainer", 1, 0, 1)
        ]

    def lines(self, pod: LogPod, *, follow: bool) -> Iterator[Line]:
        first = 0 if self.tail is None else max(0, self._written - self.tail)
        for number in range(first, self._written):
            yield Line("", f"rank {pod.node}", f"{self._text} {number} of attempt {pod.attempt}")


def open_tools(backend: Any, *, local: bool = False, asked: list[str | None] | None = None) -> JobTools:
    """Return the tools for a backend; ``asked`` receives the namespaces for which they open a client."""

    def open_client(namespace: str | None) -> Client:
        if asked is not None:
            asked.append(namespace)
        client = Client()
        client.backend = backend
        return client

    return JobTools(open_client, local=local)


def test_every_tool_is_a_documented_method() -> None:
    names = [tool.name for tool in (*READ_TOOLS, *WRITE_TOOLS)]
    assert len(set(names)) == len(names)
    for tool in (*READ_TOOLS, *WRITE_TOOLS):
        assert getattr(JobTools, tool.method).__doc__
        assert tool.reads_only == (tool in READ_TOOLS)
    assert [tool.name for tool in WRITE_TOOLS if tool.destroys] == ["delete"]


class TestReading:
    def test_list_is_cut_and_states_the_number(self) -> None:
        backend = FakeBackend(JOB)
        backend.list = lambda *, everywhere=False: {"items": [JOB] * (LIST_ROWS + 5)}  # type: ignore[method-assign]
        lines = open_tools(backend).list_jobs().splitlines()
        assert len(lines) == LIST_ROWS + 2
        assert lines[-1] == f"(the last {LIST_ROWS} of {LIST_ROWS + 5} jobs; name a namespace)"

    def test_status_is_yaml_without_the_points_of_charts(self) -> None:
        shown = yaml.safe_load(open_tools(FakeBackend(JOB)).read_status("x"))
        assert shown == {"metadata": {"name": "x"}, "status": {"phase": "Running", "reason": "Training"}}

    def test_long_text_is_cut_at_the_limit_between_characters(self) -> None:
        status = {"phase": "Running", "message": "é" * OUTPUT_BYTES}
        text = open_tools(FakeBackend(JOB | {"status": status})).read_status("x")
        shown, _, note = text.rpartition("\n")
        assert note == f"(cut after {OUTPUT_BYTES} bytes)"
        assert OUTPUT_BYTES - 4 <= len(shown.encode()) <= OUTPUT_BYTES

    def test_error_has_no_invisible_text(self) -> None:
        def fail() -> str:
            raise ClientError("pod a\U000e0041\u202eb failed")

        with pytest.raises(Exception, match=r"^pod ab failed$"):
            mcp._report_errors(fail)()


class TestLogs:
    def test_lines_are_shared_by_the_pods_of_the_newest_attempt(self) -> None:
        lines = open_tools(ManyPodsBackend(pods=2, lines=50)).read_logs("x", lines=6).splitlines()
        assert lines == [f"[rank {rank}] line {number} of attempt 2" for rank in (0, 1) for number in (47, 48, 49)]

    def test_of_many_pods_only_the_first_are_read(self) -> None:
        lines = open_tools(ManyPodsBackend(pods=LOG_PODS + 4, lines=1)).read_logs("x").splitlines()
        assert len(lines) == LOG_PODS + 1
        assert lines[-1] == f"({LOG_PODS} of {LOG_PODS + 4} pods; pass node for another one)"

    def test_the_end_is_kept_within_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mcp_tools, "OUTPUT_BYTES", 100)
        text = open_tools(ManyPodsBackend(pods=1, lines=50)).read_logs("x", lines=50)
        assert len(text.encode()) <= 100
        assert text.endswith("line 49 of attempt 2")

    @pytest.mark.parametrize("lines", [0, -1, LOG_LINES + 1])
    def test_a_number_of_lines_out_of_bounds_is_refused(self, lines: int) -> None:
        with pytest.raises(ClientError, match=f"lines: {lines} is not between 1 and {LOG_LINES}"):
            open_tools(ManyPodsBackend(pods=1, lines=1)).read_logs("x", lines=lines)


class TestToolNames:
    @pytest.mark.parametrize(
        "name", ["", "../x", "a/b", "..", "a..b", "/etc", "X", "x?dryRun=All", "x%2f", "-x", "x" * 300]
    )
    def test_a_name_that_could_change_a_path_is_refused(self, name: str) -> None:
        tools = open_tools(FakeBackend(JOB))
        for call in (tools.read_status, tools.explain_job, tools.read_logs, tools.delete_job, tools.suspend_job):
            with pytest.raises(ClientError, match="is not a name of lower-case letters"):
                call(name)
        if name:
            with pytest.raises(ClientError, match="namespace: "):
                tools.read_status("x", namespace=name)

    def test_the_namespace_selects_the_client(self) -> None:
        asked: list[str | None] = []
        tools = open_tools(FakeBackend(JOB), asked=asked)
        tools.read_status("x")
        tools.read_status("x", namespace="team-a")
        assert asked == [None, "team-a"]


class TestWriting:
    @pytest.mark.parametrize(
        ("documents", "content"),
        [
            ([resource("a"), {"apiVersion": "v1", "kind": "Secret"}], "DDPTrainingJob, Secret"),
            ([resource("a"), resource("b")], "DDPTrainingJob, DDPTrainingJob"),
            ([{"apiVersion": "v1", "kind": "Pod"}], "Pod"),
            ([], "nothing"),
        ],
    )
    def test_submit_refuses_other_objects_than_one_job(self, documents: list[Any], content: str) -> None:
        backend = FakeBackend(JOB)
        with pytest.raises(ClientError, match=f"the manifest contains {content}; pass one DDPTrainingJob"):
            open_tools(backend).submit_manifest(yaml.safe_dump_all(documents))
        assert backend.resource == JOB


def test_command_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for module in ("mcp", "mcp.server", "mcp.server.mcpserver"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["mcp", "--local", "--runs-dir", str(tmp_path)]) == ExitCode.BAD_INPUT
    message = capsys.readouterr().err
    assert "'mcp" in message
    assert "'kubernetes>=31'" in message
