"""What the process shows about an exception: the folder, the hidden package, the pickle, the limit, the store."""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_pod.base.exceptions import (
    ADDRESS_SPACE,
    CLOSED_OUTPUT,
    ENDED_READER,
    HIDDEN_PACKAGE,
    NO_FOLDER,
    NO_GRADIENTS,
    PICKLED_NAME,
    STORE_KEY,
)
from ddp_pod.features.watchdog.wait_channels import find_blocked_child
from ddp_pod.rank.circumstances import Circumstance, find_circumstance
from ddp_pod.rank.tracebacks import _build_facts, _Link


def raised(act: Any, *arguments: Any) -> BaseException:
    """Return what a call raises."""
    try:
        act(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def find(error: BaseException) -> Circumstance | None:
    """Return what is found with the facts that a rank records of an exception."""
    return find_circumstance(error, _build_facts(_Link(error, handled=False), 0.0))


def found(error: BaseException) -> str:
    circumstance = find(error)
    return "" if circumstance is None else circumstance.content


def test_deleted_working_folder_explains_errors_without_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    missing = raised(open, "missing")
    assert found(missing) == "", "the folder is there"
    shutil.rmtree(folder)
    error = find(raised(os.path.abspath, "missing"))
    assert error is not None
    assert (error.content, str(folder) in error.note) == (NO_FOLDER, True)
    assert found(raised(open, "/missing")) == ""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a script, whose file ``toolbox.py`` hides an installed package."""
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "toolbox"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def sharpen(): pass\n")
    (package / "saws.py").write_text("")
    script = tmp_path / "script"
    script.mkdir()
    (script / "toolbox.py").write_text("")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.syspath_prepend(script)
    monkeypatch.delitem(sys.modules, "toolbox", raising=False)
    return script


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ("from toolbox.saws import cut", HIDDEN_PACKAGE),
        ("from toolbox import sharpen", HIDDEN_PACKAGE),
        ("import toolbox; toolbox.sharpen()", HIDDEN_PACKAGE),
        ("import toolbox; toolbox.paint()", ""),  # neither has it
        ("import toolbox.nails", ""),
    ],
)
def test_file_with_the_name_of_a_package_is_named_if_that_has_what_is_missing(
    installed: Path, line: str, content: str
) -> None:
    error = raised(exec, line, {})
    assert found(error) == content
    if content:
        circumstance = find(error)
        assert circumstance is not None
        assert f"{installed / 'toolbox.py'} hides" in circumstance.note
    sys.modules.pop("toolbox", None)


@pytest.mark.parametrize("kind", ["module", "name"])
def test_pickle_that_needs_absent_code_is_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "text_utils_of_a_test.py"
    source.write_text("class Tokenizer: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(source.stem)
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(module.Tokenizer()))
    if kind == "name":
        del module.Tokenizer
    else:
        monkeypatch.setitem(sys.modules, source.stem, None)

    def load() -> None:
        with open(path, "rb") as file:
            pickle.load(file)

    circumstance = find(raised(load))
    assert circumstance is not None
    assert (circumstance.content, circumstance.note) == (PICKLED_NAME, f" (named in {path})")
    sys.modules.pop(source.stem, None)
    assert found(raised(importlib.import_module, "no_such_module_of_a_test")) == ""


def test_mistake_beside_a_file_that_has_the_name_is_no_pickle(tmp_path: Path) -> None:
    settings = str(tmp_path / "settings.yaml")
    Path(settings).write_text("hidden_size: 3\nno_such_module: 1\n")
    mistakes = ("settings.hidden_size", "import no_such_module", "importlib.import_module('no_such_module')")
    for line in mistakes:
        assert found(raised(exec, line, {"settings": settings, "importlib": importlib})) == ""


@pytest.mark.parametrize(
    ("limit", "error", "content"),
    [
        (1 << 20, RuntimeError("can't start new thread"), ADDRESS_SPACE),
        (1 << 20, MemoryError(), ADDRESS_SPACE),
        (1 << 20, OSError(11, "x"), ADDRESS_SPACE),
        (1 << 20, RuntimeError("another"), ""),
        (1 << 60, MemoryError(), ""),  # the machine has less memory
        (1 << 44, RuntimeError("can't allocate memory: you tried to allocate 99999999999999 bytes"), ADDRESS_SPACE),
        (1 << 44, RuntimeError("can't allocate memory: you tried to allocate 8192 bytes"), ""),
        (resource.RLIM_INFINITY, RuntimeError("can't start new thread"), ""),
    ],
)
def test_limit_of_the_address_space_explains_a_lack_of_memory(
    limit: int, error: Exception, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert found(error) == content


def test_key_of_the_store_counts_where_the_script_itself_waits_for_it() -> None:
    kind = type("DistStoreError", (RuntimeError,), {"__module__": "torch.distributed"})

    def wait() -> None:
        raise kind("wait timeout after 3000ms, keys: /ready")

    assert found(raised(wait)) == STORE_KEY
    code = compile("raise kind('wait timeout')", "/usr/lib/python3.11/site-packages/torch/distributed/x.py", "exec")
    assert found(raised(exec, code, {"kind": kind})) == ""


@pytest.mark.parametrize("others", [0, 1])
def test_pipe_whose_reader_has_ended_names_the_process(others: int) -> None:
    line = [sys.executable, "-c", "raise SystemExit(3)", "--token=hf_secret"]
    children = [subprocess.Popen(line, stdin=subprocess.PIPE, bufsize=0) for _ in range(1 + others)]

    def send(program: Any, other: Any) -> None:
        program.stdin.write(b"step 1")

    try:
        for child in children:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        circumstance = find(raised(send, children[0], children[-1]))
        if others:  # which of them has read the pipe is not known
            assert circumstance is None
        else:
            assert circumstance is not None
            assert circumstance.content == ENDED_READER
            name = os.path.basename(sys.executable)  # the arguments may have secrets
            assert circumstance.note == f" (its process {name} has ended with exit code 3)"
        assert children[0].returncode is None
    finally:
        for child in children:
            child.stdin.close()  # type: ignore[union-attr]
            child.wait()


def test_child_that_waits_for_its_reader_is_found() -> None:
    write = f"[{sys.executable!r}, '-c', 'import os; os.write(1, bytes(1 << 20))']"
    program = f"""
import subprocess, sys
child = subprocess.Popen({write}, stdout=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.readline()
child.communicate()
print("read", flush=True)
sys.stdin.readline()
"""
    # A process of its own: this one may have children of other tests.
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        blocked = None
        deadline = time.monotonic() + 60
        while blocked is None and time.monotonic() < deadline:
            time.sleep(0.01)
            blocked = find_blocked_child(parent.pid)
        assert blocked is not None
        assert (blocked.pid, blocked.command) == (child, os.path.basename(sys.executable))
        print(file=parent.stdin, flush=True)
        assert parent.stdout.readline() == "read\n"
        assert find_blocked_child(parent.pid) is None


def test_output_without_a_reader_is_told_from_another_closed_pipe() -> None:
    code = """
import os, sys
from ddp_pod.base.exceptions import ExceptionFacts
from ddp_pod.rank.circumstances import find_circumstance
reader, writer = os.pipe()
os.close(reader)
kept = os.dup(2)
for name in ("other", "output"):
    if name == "output":
        os.dup2(writer, 1)
    found = find_circumstance(BrokenPipeError(32, "Broken pipe"), ExceptionFacts())
    os.write(kept, f"{name}: {found and found.content};".encode())
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == f"other: None;output: {CLOSED_OUTPUT};"


@pytest.mark.parametrize(("zeroed", "content"), [(True, NO_GRADIENTS), (False, "")])
def test_step_without_gradients_is_observed(zeroed: bool, content: str) -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    if zeroed:
        optimizer.zero_grad()
        assert found(raised(scaler.step, optimizer)) == content
        return
    scaler.unscale_(optimizer)
    assert found(raised(scaler.unscale_, optimizer)) == content


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in SqrtBackward0")
def test_anomaly_mode_names_the_line_of_the_forward_pass() -> None:
    def train() -> None:
        total = torch.zeros(2, requires_grad=True).mul(0).sqrt()  # forward
        (total * 0).sum().backward()

    with torch.autograd.detect_anomaly():
        error = raised(train)
    circumstance = find(error)
    assert circumstance is not None
    assert "(computed in test_circumstances.py:" in circumstance.note
    assert "sqrt()  # forward" in circumstance.note
