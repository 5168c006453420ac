"""Pure parts of the launcher: command lines, failures, the termination message, merged metrics, the agent."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_operator.manifests.pod import _workers_grace
from ddp_pod.base.files import write_json
from ddp_pod.base.pod import Pod, add_pod_flags, read_pod
from ddp_pod.contract.command_line import PythonLine, split_python_line
from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.plan import PreflightConfig, WatchdogConfig, decode_config, encode_config, loopback_address
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.progress.rank_reader import fetch_page
from ddp_pod.supervise.agent_process import AgentProcess
from ddp_pod.supervise.main import main
from ddp_pod.supervise.supervisor import Supervisor
from tests.support.builders import job
from tests.support.launcher_config import CONFIG, encoded_config, launcher_pod

# ---- command lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "-u"], PythonLine([], "script", "train.py", ["-u"])),
        (["-u", "-O", "train.py"], PythonLine(["-u", "-O"], "script", "train.py", [])),
        (["-uO", "train.py"], PythonLine(["-uO"], "script", "train.py", [])),
        (["-W", "ignore", "-Xdev", "train.py"], PythonLine(["-Wignore", "-Xdev"], "script", "train.py", [])),
        (["-m", "a.b", "-m"], PythonLine([], "module", "a.b", ["-m"])),
        (["-um", "a.b"], PythonLine(["-u"], "module", "a.b", [])),
        (["-ma.b"], PythonLine([], "module", "a.b", [])),
        (["-c", "pass", "x"], PythonLine([], "code", "pass", ["x"])),
        (
            ["--check-hash-based-pycs", "never", "t.py"],
            PythonLine(["--check-hash-based-pycs", "never"], "script", "t.py", []),
        ),
    ],
)
def test_python_command_line_is_split_as_in_cpython(words: list[str], expected: PythonLine) -> None:
    assert split_python_line(words) == expected


def pod_of(nodes: int = 2, elastic: bool = False, **env: str) -> Pod:
    config = encoded_config(nodes=nodes, elastic=elastic)
    address = {"MASTER_ADDR": "job-1-0.job", "MASTER_PORT": "29400", "DDP_RENDEZVOUS_SECRET": "secret"}
    return read_pod({**address, **config, **env}, "/runtime")


@pytest.mark.parametrize("secret", ["", " \n"])
@pytest.mark.parametrize("size", [{}, {"nodes": 1, "elastic": True}])
def test_empty_secret_is_refused_with_peers_only(size: Any, secret: str) -> None:
    with pytest.raises(ValueError, match=r"^DDP_RENDEZVOUS_SECRET is empty"):
        pod_of(**size, DDP_RENDEZVOUS_SECRET=secret)
    assert pod_of(nodes=1, DDP_RENDEZVOUS_SECRET=secret).secret == ""


def test_pod_adds_its_own_flags() -> None:
    master = pod_of()
    worker = pod_of(JOB_COMPLETION_INDEX="1")
    c10d = ["--rdzv-backend=c10d", "--local-addr=job-1-1.job"]
    default = ["--monitor-interval=0.1"]
    assert add_pod_flags(c10d, master) == [*default, *c10d, "--rdzv-endpoint=localhost:29400"]
    assert add_pod_flags(c10d, worker) == [*default, *c10d, "--rdzv-endpoint=job-1-0.job:29400"]
    lone = add_pod_flags(c10d, pod_of(nodes=1))
    assert lone[-2:] == ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    here = add_pod_flags(c10d, pod_of(JOB_COMPLETION_INDEX="1", MASTER_ADDR="127.0.0.1"))
    assert here[-1] == "--local-addr=127.0.100.101"


def test_loopback_addresses_sort_by_pod_index() -> None:
    addresses = [loopback_address(index) for index in range(5000)]
    assert sorted(addresses) == addresses
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        socket.inet_aton(address)


def test_configuration_survives_json() -> None:
    watchdog = WatchdogConfig(900, 300.5, 1800, "Restart")
    preflight = PreflightConfig(True, ("dns", "tcp"), 1e6)
    config = dataclasses.replace(
        CONFIG, elastic=True, watchdog=watchdog, preflight=preflight, log_patterns=("a", "b$"), epochs=3
    )
    assert decode_config(encode_config(config)) == config
    assert json.loads(encode_config(config))["watchdog"]["startSeconds"] == 900


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "is not set; the operator and `ddp run` set it"),
        ("{", "cannot be read: JSONDecodeError: Expecting property name"),
        ("[]", "cannot be read: TypeError: "),
        ("{}", "cannot be read: KeyError: 'nodes'"),
        (lambda raw: raw | {"watchdog": {"startSeconds": 1}}, "cannot be read: KeyError: 'stallSeconds'"),
        (lambda raw: raw | {"watchdog": "mode=Fail"}, "cannot be read: TypeError: "),
    ],
)
def test_invalid_configuration_names_field(text: Any, problem: str) -> None:
    if callable(text):
        text = json.dumps(text(json.loads(encode_config(CONFIG))))
    with pytest.raises(ValueError, match=f"^DDP_LAUNCHER_CONFIG {problem}"):
        decode_config(text)


def test_missing_configuration_ends_pod_with_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DDP_LAUNCHER_CONFIG", raising=False)
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("DDP_TERMINATION_LOG", str(tmp_path / "message"))
    assert main(["--", "-c", "pass"], []) == 81
    reported = json.loads((tmp_path / "message").read_text())
    assert (reported["category"], reported["exitCode"]) == ("UserError", 81)
    assert reported["message"].startswith("DDP_LAUNCHER_CONFIG is not set")
    assert reported["message"] in capsys.readouterr().err


def test_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="DDP_GRACE_SECONDS='soon' is not a number"):
        pod_of(DDP_GRACE_SECONDS="soon")


# ---- failures


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"type": 5, "message": [], "time": "soon"}', b"\xff\xfe", b'{"time": NaN}']
)
def test_invalid_error_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "0.json").write_bytes(content)
    pod = launcher_pod(tmp_path)
    failure = examine_worker(pod, WorkerEnd(1, time=1.0))
    assert failure == Failure(
        category="Unknown",
        container_exit_code=82,
        rank=0,
        local_rank=0,
        pod_index=0,
        exit_code=1,
        message="worker exited with code 1",
        remedy=failure.remedy,
        time=1.0,
        signature="exit code 1",
        evidence="ExitCode",
    )


def test_error_of_record_decorator_is_read(tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path)
    examined = examine_worker(pod, WorkerEnd(1, message="KeyError: 'x'"))
    assert (examined.exception_type, examined.message) == ("KeyError", "KeyError: 'x'")


@pytest.mark.parametrize(("restarts", "remembered"), [(0, True), (1, False)])
def test_failure_before_stop_signal_counts_before_agent_reports_running(
    tmp_path: Path, restarts: int, remembered: bool
) -> None:
    (tmp_path / "errors").mkdir()
    error = {"rank": 1, "localRank": 1, "exitCode": 1, "type": "ValueError", "message": "the cause"}
    write_json(str(tmp_path / "errors" / "1.json"), error)
    pod = Supervisor(launcher_pod(tmp_path, in_place_restarts=restarts), [], [], [], warm=False)
    pod._restarts.count = pod._restarts._spent = restarts
    pod._enter("Rendezvous")
    pod._agent.pid = 2**22 + 1  # no process
    pod._on_signal(signal.SIGTERM)
    assert bool(pod._final) is remembered


@pytest.mark.parametrize("total", [0, 1, 8, 40, 60, 150, 3600])
def test_pod_finishes_its_own_work_before_the_kubelet_kills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    parsed = job(checkpoint={"path": "/data", "graceSeconds": 600})
    workers_grace = _workers_grace(parsed, {"terminationGracePeriodSeconds": total})
    pod = Supervisor(launcher_pod(tmp_path, grace=float(workers_grace)), [], [], [], warm=False)
    now = 100.0
    monkeypatch.setattr("ddp_pod.supervise.supervisor.time.monotonic", lambda: now)
    pod._receive_signal(signal.SIGTERM, None)
    now += workers_grace  # a long copy of the state in memory was saved meanwhile
    pod._note_stop_signals()
    assert pod._stop_deadline is not None
    assert pod._finish_by is not None
    assert 100 + workers_grace <= pod._stop_deadline <= pod._finish_by <= 100 + total


def test_taken_port_is_replaced_if_port_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as taken:
        taken_port = taken.getsockname()[1]
        pod = launcher_pod(tmp_path, metrics_port=taken_port)
        Supervisor(pod, [], [], [], warm=False)._serve_metrics()
        assert f"no metrics: cannot listen on port {taken_port}" in capsys.readouterr().err
        monkeypatch.setenv("DDP_PORT_FILE", str(tmp_path / "port"))
        Supervisor(pod, [], [], [], warm=False)._serve_metrics()
    port = json.loads((tmp_path / "port").read_text())
    assert f"metrics are on port {port}: cannot listen on {taken_port}" in capsys.readouterr().err
    assert "ddp_launcher_phase" in fetch_page(port)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentProcess, socket.socket, list[int]]]:
    """A requested agent, the end of its channel, and the pids that received signals. Its server has pid 4321."""
    requests, theirs = socket.socketpair()
    killed: list[int] = []
    monkeypatch.setattr("ddp_pod.supervise.agent_process.start_fork_server", lambda worker: (4321, requests))
    monkeypatch.setattr("ddp_pod.supervise.agent_process.kill", lambda pid, number: killed.append(pid))
    process = AgentProcess(launcher_pod(tmp_path), ["python", "worker", "script", "0", "train.py"], warm=True)
    process.start(["--nnodes=1"], None, 0)
    _, (descriptor,), _, _ = socket.recv_fds(theirs, 4, 1)
    assert json.loads(theirs.recv(1 << 16))["flags"] == ["--nnodes=1"]
    with socket.socket(fileno=descriptor) as channel, theirs:
        yield process, channel, killed
    requests.close()


def test_agent_has_pid_of_its_server_until_it_reports(agent: Any) -> None:
    process, channel, killed = agent
    process.kill(signal.SIGTERM)
    channel.sendall(b'{"pid": 77, "server": 78}\n{"phase": "Rendezvous"}\n')
    assert [event.get("phase") for event in process.receive()] == [None, "Rendezvous"]
    assert killed == [4321, 77], "it was forked before its server ended"
    process.note_end(4321, 0)
    assert (process.status, process.server) == (None, 0)  # the next agent needs another server
    process.note_end(77, signal.SIGKILL)
    assert process.status == -signal.SIGKILL
    channel.close()
    process.receive()
    assert killed == [4321, 77]


def test_agent_that_was_never_forked_ends_with_its_server(agent: Any) -> None:
    process, channel, killed = agent
    channel.close()
    assert process.receive() == []
    assert killed == [4321]  # which may have exited already
    process.note_end(4321, signal.SIGSEGV)
    assert (process.status, process.server) == (-signal.SIGSEGV, 0)


def test_stop_signal_reaches_workers_on_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = Supervisor(launcher_pod(tmp_path / "full"), [], [], [], warm=False)
    sent: list[int] = []
    monkeypatch.setattr(pod._agent, "kill", sent.append)
    pod._on_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM]
    assert "stopping: No such file or directory" in capsys.readouterr().err
