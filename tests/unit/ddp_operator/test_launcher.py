"""The launcher's pure parts: command lines, verdicts, the termination message, merged metrics."""

from __future__ import annotations

import ast
import json
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator import launcher
from ddp_operator.launcher import PythonLine, Verdict, classify, fit_termination_message, merge_pages

SOURCE = Path(launcher.__file__).read_text(encoding="utf-8")


def test_the_file_runs_in_any_image_with_python_3_9() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 9))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or "ddp_operator"] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= sys.stdlib_module_names
    assert len(SOURCE.encode()) < 500_000  # a ConfigMap holds 1 MiB


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
def test_a_python_command_line_is_split_as_cpython_does(words: list[str], expected: PythonLine) -> None:
    assert launcher.split_python_line(words) == expected


def read_pod(**env: str) -> launcher.Pod:
    return launcher.read_pod(
        {"MASTER_ADDR": "job-1-0.job", "MASTER_PORT": "29400", "DDP_NODES": "2", **env}, "/runtime"
    )


def test_flags_that_only_the_pod_knows() -> None:
    master, worker = read_pod(), read_pod(JOB_COMPLETION_INDEX="1")
    c10d = ["--rdzv-backend=c10d", "--local-addr=job-1-1.job"]
    default = ["--monitor-interval=0.1"]
    assert launcher.add_pod_flags(c10d, master) == [*default, *c10d, "--rdzv-endpoint=localhost:29400"]
    assert launcher.add_pod_flags(c10d, worker) == [*default, *c10d, "--rdzv-endpoint=job-1-0.job:29400"]
    static = ["--rdzv-backend=static"]
    own = ["--master-addr=job-1-0.job", "--master-port=29400", "--node-rank=1"]
    assert launcher.add_pod_flags(static, worker) == [*default, *static, *own]
    lone = launcher.add_pod_flags(c10d, read_pod(DDP_NODES="1"))
    assert lone[-2:] == ["--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    here = launcher.add_pod_flags(c10d, read_pod(JOB_COMPLETION_INDEX="1", MASTER_ADDR="127.0.0.1"))
    assert here[-1] == "--local-addr=127.0.100.101"


def test_pods_on_one_machine_are_ranked_by_their_index() -> None:
    addresses = [launcher.loopback_address(index) for index in range(5000)]
    assert sorted(addresses) == addresses
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        socket.inet_aton(address)


def test_an_environment_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="DDP_GRACE_SECONDS='soon' is not a number"):
        read_pod(DDP_GRACE_SECONDS="soon")


# ---- verdicts

GLOO = "[pair.cc:553] Connection closed by peer [10.0.0.1]:2456. gloo/transport/tcp"


@pytest.mark.parametrize(
    ("code", "kind", "message", "expected"),
    [
        (1, "ValueError", "boom", Verdict("UserError", 82)),
        (1, "ModuleNotFoundError", "No module named 'x'", Verdict("UserError", 81)),
        (1, "SyntaxError", "invalid syntax", Verdict("UserError", 81)),
        (1, "SystemExit", "python: No module named x", Verdict("UserError", 81)),
        (2, "SystemExit", "2", Verdict("UserError", 81)),
        (1, "RuntimeError", GLOO, Verdict("NCCL", 86, True)),
        (1, "torch.distributed.DistNetworkError", "failed to recv, got 0 bytes", Verdict("NCCL", 86, True)),
        (
            1,
            "torch.distributed.DistNetworkError",
            "port: 29500, EADDRINUSE, address already in use",
            Verdict("NCCL", 82),
        ),
        (1, "torch.distributed.DistBackendError", "NCCL error: remote process exited", Verdict("NCCL", 86, True)),
        (1, "torch.distributed.DistBackendError", "NCCL: Duplicate GPU detected", Verdict("NCCL", 82)),
        (1, "ConnectionResetError", "[Errno 104] Connection reset by peer", Verdict("UserError", 82)),
        (1, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate", Verdict("OOM", 84)),
        (1, "RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory", Verdict("OOM", 84)),
        (1, "MemoryError", "", Verdict("OOM", 84)),
        (1, "RuntimeError", "CUDA error: device-side assert triggered", Verdict("CUDAError", 82)),
        (1, "torch.AcceleratorError", "CUDA error: an illegal memory access was encountered", Verdict("CUDAError", 82)),
        (1, "RuntimeError", "Triton Error [CUDA]: misaligned address", Verdict("CUDAError", 82)),
        (1, "RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Verdict("CUDAError", 82)),
        (
            1,
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            Verdict("OOM", 84),
        ),
        (
            1,
            "RuntimeError",
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
            Verdict("UserError", 82),
        ),
        (
            1,
            "RuntimeError",
            "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
            Verdict("UserError", 82),
        ),
        (1, "RuntimeError", "Expected a 'cuda' device type for generator but found 'cpu'", Verdict("UserError", 82)),
        (1, "ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", Verdict("UserError", 82)),
        (1, "AssertionError", "Torch not compiled with CUDA enabled", Verdict("UserError", 82)),
        (-9, "", "", Verdict("Unknown", 82)),
        (-11, "", "", Verdict("Unknown", 82)),
        (1, "", "", Verdict("Unknown", 82)),
        (81, "", "", Verdict("UserError", 81)),
        (83, "", "", Verdict("Hang", 83)),
        (84, "SystemExit", "84", Verdict("OOM", 84)),
        (85, "", "", Verdict("Preempted", 85)),
        (86, "", "", Verdict("NCCL", 86, True)),
    ],
)
def test_verdicts(code: int, kind: str, message: str, expected: Verdict) -> None:
    assert classify(code, kind, message, oom_killed=False, non_retryable=[2]) == expected


@pytest.mark.parametrize(
    ("code", "kind", "message", "remedy"),
    [
        (1, "ValueError", "boom", "look at the traceback"),
        (1, "ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "backend gloo"),
        (1, "RuntimeError", "CUDA error: invalid device ordinal", "LOCAL_RANK"),
        (1, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", "the GPU's memory is full"),
        (1, "RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "the GPU's memory is full"),
        (1, "MemoryError", "", "raise the memory limit"),
        (1, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. ", "for memory"),
        (1, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Bus error. ", "spec.shm.sizeLimit"),
        (1, "torch.distributed.DistNetworkError", "port: 29500, EADDRINUSE", "no fixed port"),
        (1, "RuntimeError", GLOO, "another rank went away first"),
        (1, "RuntimeError", "Distributed package doesn't have NCCL built in", "backend gloo"),
        (3, "SystemExit", "3", "its last lines in the log"),
        (4, "", "", "its last lines in the log"),
        (-11, "", "", "native code"),
        (-9, "", "", "by the kernel for memory"),
    ],
)
def test_the_hint_is_of_this_failure(code: int, kind: str, message: str, remedy: str) -> None:
    failed = {"type": kind, "message": message, "exitCode": code, "traceback": "Traceback" if kind else ""}
    report = {
        **failed,
        "rank": 1,
        "message": launcher.describe_root(failed),
        "exitCode": code % 256 if code > 0 else 128 - code,
    }
    assert remedy in launcher.advise(classify(code, kind, message, oom_killed=False), report)


def test_an_exception_that_torch_hands_on_is_told_by_its_last_line() -> None:
    message = "Caught KeyError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n  File x\n"
    failed = {"type": "KeyError", "exitCode": 1, "message": f"{message}KeyError: 'no label'\n"}
    assert launcher.describe_root(failed) == "KeyError: 'no label' (in DataLoader worker process 1)"
    assert launcher.describe_root({**failed, "message": "Caught it"}) == "KeyError: Caught it"


@pytest.mark.parametrize(
    ("kind", "message", "traceback", "words"),
    [
        ("SystemExit", "3", "", "worker exited with code 3"),
        ("SystemExit", "no such option", "", "worker exited with code 3: no such option"),
        (
            "AssertionError",
            "",
            'File "/lib/a.py", line 2\n  File "/x/train.py", line 12',
            "AssertionError (train.py, line 12)",
        ),
        ("MemoryError", "", "", "MemoryError"),
        ("pkg.errors.Bad", "boom", "", "Bad: boom"),
    ],
)
def test_a_failed_worker_is_told_in_a_line(kind: str, message: str, traceback: str, words: str) -> None:
    failed = {"type": kind, "exitCode": 3, "message": message, "traceback": traceback}
    assert launcher.describe_root(failed) == words


def test_the_launchers_own_words_need_no_hint() -> None:
    report = {"rank": None, "message": "training script not found: x; check command", "traceback": "", "exitCode": 81}
    assert launcher.advise(Verdict("UserError", 81), report) == ""


def test_without_a_rank_there_is_no_log_of_it_to_look_at() -> None:
    report = {"rank": None, "message": "torchrun failed", "traceback": "", "exitCode": 1}
    assert launcher.advise(Verdict("Unknown", 82), report) == ""


def test_sigkill_is_out_of_memory_only_where_the_kernel_says_so() -> None:
    assert classify(-9, "", "", oom_killed=True) == Verdict("OOM", 84)
    assert classify(137, "", "", oom_killed=True) == Verdict("OOM", 84)
    assert classify(-11, "", "", oom_killed=True).category == "Unknown"


def failure(rank: int, when: float, *, victim: bool = False, code: int = 1, kind: str = "ValueError") -> dict[str, Any]:
    return {"rank": rank, "time": when, "exitCode": code, "type": kind, "verdict": Verdict("x", 82, victim)}


def test_the_root_is_the_earliest_failure_that_explains_the_others() -> None:
    failures = [failure(0, 1, victim=True), failure(1, 3), failure(2, 2), failure(3, 0, code=-15, kind="")]
    assert launcher.find_root(failures)["rank"] == 2
    assert launcher.find_root([failures[3], failures[0]])["rank"] == 0
    assert launcher.find_root([failures[3]])["rank"] == 3


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"type": 5, "message": [], "time": "soon"}', b"\xff\xfe", b'{"time": NaN}']
)
def test_a_garbage_error_file_changes_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "0.json").write_bytes(content)
    pod = launcher.read_pod({}, str(tmp_path))
    seen = {"rank": 0, "localRank": 0, "exitCode": 1, "time": 1.0, "type": "", "message": "", "traceback": ""}
    assert launcher.judge(pod, seen) == {**seen, "verdict": Verdict("Unknown", 82)}


def test_a_script_under_record_is_understood(tmp_path: Path) -> None:
    pod = launcher.read_pod({}, str(tmp_path))
    seen = {
        "rank": 0,
        "localRank": 0,
        "exitCode": 1,
        "time": 1.0,
        "type": "",
        "message": "KeyError: 'x'",
        "traceback": "",
    }
    judged = launcher.judge(pod, seen)
    assert (judged["type"], judged["message"]) == ("KeyError", "'x'")


# ---- the termination message


def message(**fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "category": "UserError",
        "message": "m",
        "traceback": "",
        "hint": "h",
        "progress": {},
        **fields,
    }


def test_a_short_message_is_kept_whole() -> None:
    assert json.loads(fit_termination_message(message(traceback="t"))) == message(traceback="t")


def test_a_long_traceback_keeps_its_tail() -> None:
    cut = json.loads(fit_termination_message(message(traceback="line\n" * 5000 + "ValueError: boom\n")))
    assert cut["traceback"].endswith("ValueError: boom\n")
    assert len(cut["traceback"]) > 2000
    assert cut["message"] == "m"


@given(
    text=st.text(alphabet=st.characters(), max_size=300),
    repeat=st.integers(1, 60),
    names=st.lists(st.text(max_size=50), max_size=60),
)
def test_any_message_fits_and_is_json(text: str, repeat: int, names: list[str]) -> None:
    long = text * repeat
    fitted = fit_termination_message(
        message(message=long, traceback=long, hint=long, progress=dict.fromkeys(names, 1.5))
    )
    assert len(fitted) <= 4096
    assert json.loads(fitted.decode("utf-8"))["category"] == "UserError"


# ---- metrics


def test_pages_are_merged_with_one_header_a_name() -> None:
    pages = [
        f'# HELP ddp_loss The loss.\n# TYPE ddp_loss gauge\nddp_loss{{rank="{rank}"}} 0.{rank}\n'
        f'# TYPE ddp_step_seconds histogram\nddp_step_seconds_bucket{{rank="{rank}",le="+Inf"}} 1\n'
        f'ddp_step_seconds_count{{rank="{rank}"}} 1\n'
        for rank in (0, 1)
    ]
    assert merge_pages(pages).splitlines() == [
        "# HELP ddp_loss The loss.",
        "# TYPE ddp_loss gauge",
        'ddp_loss{rank="0"} 0.0',
        'ddp_loss{rank="1"} 0.1',
        "# TYPE ddp_step_seconds histogram",
        'ddp_step_seconds_bucket{rank="0",le="+Inf"} 1',
        'ddp_step_seconds_count{rank="0"} 1',
        'ddp_step_seconds_bucket{rank="1",le="+Inf"} 1',
        'ddp_step_seconds_count{rank="1"} 1',
    ]


def test_garbage_lines_equal_series_and_false_launchers_are_left_out() -> None:
    own = "ddp_launcher_in_place_restarts_total 1\n"
    garbage = (
        "<html>\nx\nddp_loss{ 1\nddp_loss one\nddp_launcher_in_place_restarts_total 9\n# EOF\nddp_loss 1\nddp_loss 2\n"
    )
    assert merge_pages([own, garbage]) == "ddp_launcher_in_place_restarts_total 1\nddp_loss 1\n"


@given(st.lists(st.text(max_size=200), max_size=4))
def test_no_page_can_break_the_merge(pages: list[str]) -> None:
    merged = merge_pages(["own 1\n", *pages])
    assert merged.startswith("own 1\n")
    assert merge_pages([merged]) == merged


def test_progress_is_what_has_no_label_but_rank() -> None:
    page = (
        '# TYPE ddp_loss gauge\nddp_loss{rank="0"} 0.5\n# TYPE ddp_epoch gauge\nddp_epoch 3\n'
        '# TYPE ddp_samples counter\nddp_samples_total{rank="0"} 64\n'
        '# TYPE ddp_lr gauge\nddp_lr{rank="0",group="1"} 1\n'
        '# TYPE ddp_bad gauge\nddp_bad{rank="0"} NaN\n'
        '# TYPE ddp_h histogram\nddp_h_count{rank="0"} 1\n# TYPE up gauge\nup 1\n'
    )
    assert launcher.read_progress(page) == {"ddp_loss": 0.5, "ddp_epoch": 3.0, "ddp_samples_total": 64.0}
    many = "".join(f"# TYPE ddp_x{n} gauge\nddp_x{n} 1\n" for n in range(1000))
    assert len(launcher.read_progress(many)) == 30


def serve_once(answer: bytes) -> int:
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with server:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                try:
                    connection.sendall(answer)
                except OSError:
                    pass

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


def test_a_page_is_fetched_and_an_endless_or_wrong_one_is_refused() -> None:
    assert launcher.fetch_page(serve_once(b"HTTP/1.0 200 OK\r\nX: y\r\n\r\nup 1\n")) == "up 1\n"
    with pytest.raises(ValueError, match="no usable page"):
        launcher.fetch_page(serve_once(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * (3 << 20)))
    with pytest.raises(ValueError, match="no usable page"):
        launcher.fetch_page(serve_once(b"HTTP/1.0 500 Oops\r\n\r\nup 1\n"))
    with pytest.raises(ValueError, match="no usable page"):
        launcher.fetch_page(serve_once(b"garbage"))


def test_a_rank_that_is_gone_leaves_its_last_page(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "1.port").write_text("1")  # nobody listens there
    (folder / "1.prom").write_text("last 1\n")
    (folder / "0.port").write_text("not a port")
    (folder / "2.port").write_text(str(serve_once(b"HTTP/1.0 200 OK\r\n\r\nlive 1\n")))
    (folder / "x.port").write_text("5")
    (folder / "3.port.tmp").write_text("5")
    assert launcher.Metrics(str(tmp_path), lambda: "").collect() == {1: "last 1\n", 2: "live 1\n"}


@pytest.mark.parametrize(("restarts", "remembered"), [(0, True), (1, False)])
def test_a_failure_before_a_stop_counts_also_where_the_agent_is_late_to_say_that_it_runs(
    tmp_path: Path, restarts: int, remembered: bool
) -> None:
    (tmp_path / "errors").mkdir()
    error = {"rank": 1, "localRank": 1, "exitCode": 1, "type": "ValueError", "message": "the cause"}
    launcher.write_json(str(tmp_path / "errors" / "1.json"), error)
    pod = launcher.Launcher(launcher.read_pod({}, str(tmp_path)), [f"--max-restarts={restarts}"], [])
    pod._restarts = pod._spent = restarts
    pod._enter("Rendezvous")
    pod._agent = 2**22 + 1  # nobody
    pod._obey(signal.SIGTERM)
    assert bool(pod._final) is remembered


def test_the_last_words_of_a_pod_are_read_however_slow_the_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0.port").write_text("1")  # nobody listens there any more
    (tmp_path / "metrics" / "1.prom").write_text("# TYPE ddp_loss gauge\nddp_loss 0.5\n")
    monkeypatch.setattr(launcher.threading.Thread, "start", lambda thread: None)  # one that gets no CPU
    monkeypatch.setattr(launcher.threading.Thread, "join", lambda thread, timeout: None)
    metrics = launcher.Metrics(str(tmp_path), lambda: "")
    assert metrics.collect() == {}
    assert metrics.progress() == {"ddp_loss": 0.5}


def test_a_taken_port_costs_no_page_where_its_reader_can_be_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as taken:
        wanted = taken.getsockname()[1]
        pod = launcher.read_pod({"DDP_METRICS_PORT": str(wanted)}, str(tmp_path))
        launcher.Launcher(pod, [], [])._serve_metrics()
        assert f"no metrics: cannot listen on port {wanted}" in capsys.readouterr().err
        monkeypatch.setenv("DDP_PORT_FILE", str(tmp_path / "port"))
        launcher.Launcher(pod, [], [])._serve_metrics()
    port = json.loads((tmp_path / "port").read_text())
    assert f"metrics are on port {port}: cannot listen on {wanted}" in capsys.readouterr().err
    assert "ddp_launcher_phase" in launcher.fetch_page(port)


def test_no_signal_is_lost_in_an_agent_that_has_the_launchers_handlers_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return 4321

    monkeypatch.setattr(launcher.os, "fork", fork)
    pod = launcher.Launcher(launcher.read_pod({}, str(tmp_path)), [], [])
    pod._start_agent()
    assert pod._agent == 4321
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert pod._channel is not None
    pod._channel.close()


def test_a_signal_to_the_agent_waits_until_the_workers_that_it_starts_are_known() -> None:
    class Torchrun:
        @staticmethod
        def _terminate_process_handler(number: int, frame: object) -> None:
            raise KeyboardInterrupt(number)

    known: list[str] = []

    def stop_amid() -> None:
        with gate:
            Torchrun._terminate_process_handler(15, None)
            known.append("worker")

    gate = launcher.SignalGate(Torchrun)
    with pytest.raises(KeyboardInterrupt, match="15"):
        stop_amid()
    assert known == ["worker"]
    with pytest.raises(KeyboardInterrupt, match="2"):
        Torchrun._terminate_process_handler(2, None)
    with launcher.SignalGate(object()):  # another torch
        pass


def test_a_stop_reaches_the_workers_also_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = launcher.Launcher(launcher.read_pod({}, str(tmp_path / "full")), [], [])
    sent: list[int] = []
    monkeypatch.setattr(pod, "_kill", lambda pid, number: sent.append(number))
    pod._obey(signal.SIGTERM)
    assert sent == [signal.SIGTERM]
    assert "stopping: No such file or directory" in capsys.readouterr().err
