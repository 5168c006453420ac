"""Pure parts of the launcher: command lines, failures, the termination message, merged metrics, the agent."""

from __future__ import annotations

import dataclasses
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ddp_operator.manifests.pod import _workers_grace
from ddp_pod import bootstrap, features
from ddp_pod.base.files import write_json
from ddp_pod.base.pod import Pod
from ddp_pod.base.pod_setup import read_pod
from ddp_pod.contract.command_line import PythonLine, split_python_line
from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.frames import read_frame
from ddp_pod.contract.plan import (
    VERSION,
    CheckpointStoreConfig,
    PreflightConfig,
    TorchrunOptions,
    WatchdogConfig,
    decode_plan,
    encode_plan,
    loopback_address,
)
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.progress.log_reader import keep_reading
from ddp_pod.progress.rank_progress import fetch_page
from ddp_pod.supervise.agent_process import AgentProcess
from ddp_pod.supervise.main import main
from ddp_pod.supervise.supervisor import Supervisor
from ddp_pod.torchrun.channel import PhaseEntered, Started
from ddp_pod.torchrun.frames import decode, encode
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
    config = encoded_config(nodes=nodes, elastic=elastic, pod_host="job-1-{}.job")
    address = {"MASTER_ADDR": "job-1-0.job", "MASTER_PORT": "29400", "DDP_RENDEZVOUS_SECRET": "secret"}
    return read_pod({**address, **config, **env}, "/runtime")


@pytest.mark.parametrize("secret", ["", " \n"])
@pytest.mark.parametrize("size", [{}, {"nodes": 1, "elastic": True}])
def test_empty_secret_is_refused_with_peers_only(size: Any, secret: str) -> None:
    with pytest.raises(ValueError, match=r"^DDP_RENDEZVOUS_SECRET is empty"):
        pod_of(**size, DDP_RENDEZVOUS_SECRET=secret)
    assert pod_of(nodes=1, DDP_RENDEZVOUS_SECRET=secret).secret == ""


@pytest.mark.parametrize(
    ("nodes", "env", "address", "store_host"),
    [
        (2, {}, "job-1-0.job", "localhost"),
        (2, {"DDP_POD_IP": "10.0.0.1"}, "job-1-0.job", "10.0.0.1"),
        (2, {"JOB_COMPLETION_INDEX": "1"}, "job-1-1.job", "job-1-0.job"),
        (2, {"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "127.0.0.1"}, "127.0.100.101", "127.0.0.1"),
        (1, {}, "127.0.0.1", "localhost"),
    ],
)
def test_pod_knows_its_address_and_the_one_of_the_store(
    nodes: int, env: dict[str, str], address: str, store_host: str
) -> None:
    pod = pod_of(nodes, **env)
    assert (pod.address, pod.store_host) == (address, store_host)


def test_loopback_addresses_sort_by_pod_index() -> None:
    addresses = [loopback_address(index) for index in range(5000)]
    assert sorted(addresses) == addresses
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        socket.inet_aton(address)


def test_plan_survives_json_and_omits_defaults() -> None:
    plan = dataclasses.replace(
        CONFIG,
        elastic=True,
        watchdog=WatchdogConfig(900, 300.5, 1800, "Restart"),
        preflight=PreflightConfig(True, ("dns", "tcp"), 1e6),
        checkpoint=CheckpointStoreConfig("s3://b/p", 3),
        log_patterns=("a", "b$"),
        epochs=3,
        torchrun=TorchrunOptions(tee="3", virtual_local_rank=True, duplicate_stdout_filters=("a", "b")),
    )
    assert decode_plan(encode_plan(plan)) == plan
    raw = json.loads(encode_plan(plan))
    assert raw["watchdog"]["startSeconds"] == 900
    assert "code" not in raw


FORMER = (
    '{"nodes":2,"spares":1,"nprocPerNode":4,"elastic":ELASTIC,"inPlaceRestarts":3,"restartsWithoutProgress":1,'
    '"joinTimeoutSeconds":600,"nonRetryableExitCodes":[2,126,127],"successPolicy":"AllNodes","watchdog":'
    '{"startSeconds":900,"stallSeconds":600,"checkpointSeconds":1800,"action":"Restart"},"preflight":null,'
    '"checkpoint":null,"logPatterns":[],"autoInstrument":true,"epochs":null,"warmStart":true,"code":null}'
)
"""The plan in a Job of the former release, which has torchrun's flags beside it."""


@pytest.mark.parametrize("elastic", ["true", "false"])
def test_plan_of_former_release_is_read_by_operator_and_refused_by_launcher(elastic: str) -> None:
    text = FORMER.replace("ELASTIC", elastic)
    plan = decode_plan(text)
    assert (plan.version, plan.nodes, plan.nproc_per_node, plan.elastic) == (0, 2, 4, elastic == "true")
    assert plan.awaits_peers
    with pytest.raises(ValueError, match=r"^DDP_LAUNCHER_CONFIG has version 0, .* mount the launcher"):
        pod_of(DDP_LAUNCHER_CONFIG=text)


def test_unknown_fields_of_later_release_are_ignored() -> None:
    raw = json.loads(encode_plan(CONFIG)) | {"version": VERSION + 1, "anything": {"new": 1}}
    assert decode_plan(json.dumps(raw)) == dataclasses.replace(CONFIG, version=VERSION + 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "is not set; the operator and `ddp run` set it"),
        ("{", "cannot be read: Expecting property name"),
        ("[]", "cannot be read: "),
        ("[" * 100_000, "cannot be read: "),
        ("{}", "cannot be read: nodes is missing"),
        (lambda raw: raw | {"watchdog": {"startSeconds": 1}}, "cannot be read: stallSeconds is missing"),
        (lambda raw: raw | {"watchdog": "mode=Fail"}, "cannot be read: watchdog is no object"),
        (lambda raw: raw | {"nodes": "2"}, "cannot be read: nodes is no int"),
        (lambda raw: raw | {"nodes": True}, "cannot be read: nodes is no int"),
        (lambda raw: raw | {"logPatterns": "a"}, "cannot be read: logPatterns is no list"),
    ],
)
def test_invalid_plan_names_field(text: Any, problem: str) -> None:
    if callable(text):
        text = json.dumps(text(json.loads(encode_plan(CONFIG))))
    with pytest.raises(ValueError, match=f"^DDP_LAUNCHER_CONFIG {problem}"):
        decode_plan(text)


def test_only_features_that_the_pod_uses_are_imported_before_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, str]] = []
    listed = (
        features.Feature("used", "stable", "", ("launcher", "agent")),
        features.Feature("broken", "stable", "", ("agent",)),
        features.Feature("asked-for", "stable", "", ("launcher", "agent"), lambda pod: pod is not None),
        features.Feature("unused", "stable", "", ("launcher", "agent"), lambda pod: pod is None),
        features.Feature("in-ranks", "stable", "", ("rank",)),
        features.Feature("in-some-ranks", "stable", "", ("agent", "rank"), rank_variable="DDP_UNSET"),
    )
    monkeypatch.setattr(features, "FEATURES", listed)

    def load(name: str, module: str) -> None:
        if name == "broken":
            raise ImportError(name)
        imported.append((name, module))

    monkeypatch.setattr(features, "_load", load)
    pod = cast("Pod", object())
    features.import_modules("agent", pod)
    assert imported == [("used", "agent"), ("asked-for", "agent"), ("in-some-ranks", "agent")]
    features.import_modules("rank", pod)
    assert imported[3:] == [("in-ranks", "rank")]


def test_missing_configuration_ends_pod_with_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DDP_LAUNCHER_CONFIG", raising=False)
    monkeypatch.setenv("DDP_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("DDP_TERMINATION_LOG", str(tmp_path / "message"))
    assert main(["--", "-c", "pass"], [], features) == 81
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
    pod = Supervisor(launcher_pod(tmp_path, in_place_restarts=restarts), [], [], warm=False, copy_output=keep_reading)
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
    pod = Supervisor(launcher_pod(tmp_path, grace=float(workers_grace)), [], [], warm=False, copy_output=keep_reading)
    now = 100.0
    monkeypatch.setattr("ddp_pod.supervise.stop.time.monotonic", lambda: now)
    pod._receive_signal(signal.SIGTERM, None)
    now += workers_grace  # a long copy of the state in memory was saved meanwhile
    pod._note_stop_signals()
    assert pod._stop.of_workers is not None
    assert pod.finish_by is not None
    assert 100 + workers_grace <= pod._stop.of_workers <= pod.finish_by <= 100 + total


def test_taken_port_is_replaced_if_port_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as taken:
        taken_port = taken.getsockname()[1]
        pod = launcher_pod(tmp_path, metrics_port=taken_port)
        Supervisor(pod, [], [], warm=False, copy_output=keep_reading)._serve_metrics()
        assert f"no metrics: cannot listen on port {taken_port}" in capsys.readouterr().err
        monkeypatch.setenv("DDP_PORT_FILE", str(tmp_path / "port"))
        Supervisor(pod, [], [], warm=False, copy_output=keep_reading)._serve_metrics()
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
    process.start(None, restarts=2, restarts_left=1)
    _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
    request = decode(read_frame(theirs))
    assert (request.restarts, request.restarts_left, request.pod.runtime) == (2, 1, str(tmp_path))
    with socket.socket(fileno=descriptor) as channel, theirs:
        yield process, channel, killed
    requests.close()


def test_agent_has_pid_of_its_server_until_it_reports(agent: Any) -> None:
    process, channel, killed = agent
    process.kill(signal.SIGTERM)
    events = encode(Started(77, 78)) + encode(PhaseEntered("Rendezvous"))
    channel.sendall(events[:-3])
    assert process.receive() == [Started(77, 78)]
    channel.sendall(events[-3:])
    assert process.receive() == [PhaseEntered("Rendezvous")], "which arrived in two parts"
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
    pod = Supervisor(launcher_pod(tmp_path / "full"), [], [], warm=False, copy_output=keep_reading)
    sent: list[int] = []
    monkeypatch.setattr(pod._agent, "kill", sent.append)
    pod._on_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM]
    assert "stopping: No such file or directory" in capsys.readouterr().err


def test_usage_names_each_subcommand() -> None:
    """Someone who starts the program by hand gets the module's docstring."""
    lines = (bootstrap.__doc__ or "").splitlines()
    named = {line.split()[1] for line in lines if line.startswith("    launcher.py ")}
    assert named == set(bootstrap._SUBCOMMANDS)
