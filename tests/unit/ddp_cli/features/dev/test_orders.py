"""Orders to the pods of `ddp dev`: their connection breaks, pod 0 is replaced, and the folder that they bring."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_cli.client import logs as logs_module
from ddp_cli.client.errors import ApiError, ClientError, Conflict
from ddp_cli.client.job import Job
from ddp_cli.client.logs import Line, LogPod, RunLogs, open_plain
from ddp_cli.features.dev import orders, rerun
from ddp_cli.features.dev.orders import PodMissing, check_takes_orders, send_order
from ddp_cli.features.dev.rerun import pack_again, watch_files
from ddp_cli.features.dev.run_lines import DevLogs
from ddp_pod.features.dev.contract import Event, Order, decode_order, encode_event
from tests.support.builders import resource, template, trainer
from tests.support.fake_backend import FakeBackend

DIGEST = "0" * 64


def build_job(phase: str = "Running", **spec: Any) -> Job:
    code = {"source": "configmap/ddp-code-0", "digest": DIGEST}
    job = resource("mine", **{"dev": {}, "code": code, **spec}) | {"status": {"phase": phase}}
    return Job(FakeBackend(job), "mine", job)  # type: ignore[arg-type]


class Channel:
    """The program in pod 0: it prints the events, then ends or breaks."""

    def __init__(self, *events: str, breaks: bool = False) -> None:
        self.output = [encode_event(Event(kind, run=2)) for kind in events]
        self.breaks = breaks
        self.received = b""

    def write(self, data: bytes) -> None:
        self.received += data

    def read(self) -> bytes:
        if self.output:
            return self.output.pop(0)
        if self.breaks:
            raise ConnectionError("reset by peer")
        return b""

    def close(self) -> None:
        pass


STARTS = ("received", "sent", "stopped", "started")


@pytest.mark.parametrize(
    ("order", "channels", "result"),
    [
        ("run", [Channel(*STARTS, "ended")], [*STARTS, "ended"]),
        ("run", [Channel("refused")], ["refused"]),
        ("run", [Channel()], "before it confirmed the order"),
        ("run", [Channel(breaks=True)], "reset by peer"),
        ("run", [ConnectionError("no route")], "no route"),
        ("run", [PodMissing("pod 0 of mine does not run")], "pod 0 of mine does not run"),
        ("run", [ApiError("pods/exec is forbidden", 403)], "forbidden"),
        ("run", [Channel(*STARTS, breaks=True), Channel("ended")], [*STARTS, "ended"]),
        ("run", [Channel(*STARTS), PodMissing("replaced"), Channel("refused"), Channel("ended")], [*STARTS, "ended"]),
        ("run", [Channel("received"), ApiError("unreachable"), Channel("ended")], ["received", "ended"]),
        ("run", [Channel("received"), ApiError("pods/exec is forbidden", 403)], "forbidden"),
        ("follow", [PodMissing("starts"), Channel("refused"), Channel("ended")], ["ended"]),
        ("release", [Channel("stopped", "released")], ["stopped", "released"]),
        ("list", [Channel("former", "listed")], ["former", "listed"]),
    ],
)
def test_order_is_followed_to_its_last_event_or_refused(
    order: str, channels: Sequence[Channel | Exception], result: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Channel] = []
    waiting = list(channels)

    def open_channel(job: Job) -> Channel:
        channel = waiting.pop(0)
        if isinstance(channel, Exception):
            raise channel
        opened.append(channel)
        return channel

    monkeypatch.setattr(orders, "_open_channel", open_channel)
    data = b"x" * 600_000
    sent: list[int] = []
    events = send_order(
        build_job(), Order(order, size=len(data)), data, on_progress=sent.append, sleep=lambda seconds: None
    )
    if isinstance(result, str):
        with pytest.raises(ClientError, match=result):
            list(events)
        return
    assert [event.kind for event in events] == result
    assert not waiting
    line, _, archive = opened[0].received.partition(b"\n")
    first = decode_order(line + b"\n")
    if len(opened) == 1:
        assert (first.kind, archive, sent[-1]) == (order, data, len(data))
    for channel in opened[1:]:
        assert channel.received == b'{"kind": "follow"}\n', "the archive is sent once"


@pytest.mark.parametrize(
    ("phase", "spec", "fact"),
    [
        ("Running", {}, ""),
        ("Held", {}, ""),
        ("Running", {"dev": None}, "no job of `ddp dev`"),
        ("Failed", {}, r"has ended \(Failed\)"),
        ("Suspended", {}, "ddp resume mine"),
    ],
)
def test_job_without_pods_that_take_orders_is_refused(phase: str, spec: dict[str, Any], fact: str) -> None:
    job = build_job(phase, **spec)
    if not fact:
        check_takes_orders(job)
        return
    with pytest.raises(Conflict, match=fact):
        check_takes_orders(job)


@pytest.mark.parametrize(
    ("files", "spec", "fact"),
    [
        (["train.py", "requirements.txt"], {}, ""),
        (["other.py"], {}, "train.py, which is not among the packed files"),
        (["train.py"], {"code": None}, "--no-code"),
        (
            ["train.py"],
            {"code": {"source": "configmap/c", "digest": DIGEST, "pip": "r.txt"}},
            "requirements",
        ),
        (["train.py", "weights.pt"], {}, "Largest files: weights.pt"),
    ],
)
def test_folder_is_packed_by_the_rules_of_submit(
    files: list[str], spec: dict[str, Any], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "MOST_CODE_BYTES", 4096)
    for name in files:
        (tmp_path / name).write_bytes(os.urandom(8192 if name == "weights.pt" else 8))
    job = build_job(template=template(trainer(command=["python", "train.py"])), **spec)
    if not fact:
        assert len(pack_again(job, tmp_path).archive.sizes) == len(files)
        return
    with pytest.raises(ClientError, match=fact):
        pack_again(job, tmp_path)


def test_saves_of_packed_files_are_reported_once_they_are_complete(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.log\n")
    script = tmp_path / "train.py"
    script.write_text("1")

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)

    steps = [
        lambda: write("out.log", "ignored"),
        lambda: write("train.py", "a longer one"),
        lambda: write("part.py", "of the same save"),
        lambda: None,
        lambda: script.unlink(),
        lambda: None,
    ]
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        if slept == len(steps):
            raise KeyboardInterrupt
        steps[slept]()
        slept += 1

    saves = watch_files(tmp_path, sleep=sleep)
    next(saves)
    assert slept == 4
    next(saves)
    assert slept == 6
    with pytest.raises(KeyboardInterrupt):
        next(saves)


def test_lines_of_runs_are_numbered_and_those_between_runs_left_out() -> None:
    texts = ("before", "[launcher] run 1 starts", "one", "[launcher] run 1 has ended", "between")
    later = ("[launcher] run 3 starts", "three", "[launcher] runs well", "last")
    lines = tuple(Line("", "rank 0", text) for text in (*texts, *later))
    backend = FakeBackend({}, lines=lines)
    logs = DevLogs(backend, is_new=True)  # type: ignore[arg-type]
    found = list(logs.lines(LogPod("x", "trainer", 1, 0, 1), follow=True))
    assert [(line.run, line.text) for line in found] == [
        (1, "one"), (3, "three"), (3, "[launcher] runs well"), (3, "last"),
    ]  # fmt: skip
    assert logs.open_runs == {"x": 3}


@pytest.mark.parametrize("is_new", [True, False])
def test_a_new_run_on_this_machine_does_not_wait_for_the_lines_of_former_ones(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "read_job", lambda _: resource("mine"))
    file = tmp_path / "attempt-1-pod-0.log"
    file.write_text("[launcher] run 1 starts\n[rank 0] one\n[rank 0] cut")
    folder: Any = SimpleNamespace(logs=tmp_path, open_file=open_plain, in_use=False)
    logs = DevLogs(RunLogs(folder, None, None, None), is_new=is_new)
    with file.open("a") as stream:
        stream.write(" line\n[launcher] run 2 starts\n[rank 0] two\n")
    (pod,) = logs.pods()
    runs = [line.run for line in logs.lines(pod, follow=False)]
    assert runs == ([2] if is_new else [1, 1, 2])
