"""Values that come from outside through attributes, globals, closures, caches and files, as real scripts get them."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

import pytest

from ddp_pod.base.exceptions import ExceptionFacts, FailingCode
from ddp_pod.failures.kinds import UNKNOWN_KIND
from ddp_pod.failures.mistakes import recurs
from ddp_pod.rank.failing_code import find_failing_code
from tests.support.rank_errors import catch

_FETCH = "import subprocess, functools\ndef fetch(): return dict.fromkeys(subprocess.getoutput('true'))\n"


def find_sources_of(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, since: float = 0.0) -> str:
    monkeypatch.chdir(folder)
    path = folder / f"train{len(list(folder.iterdir()))}.py"  # a new one: sources are cached
    path.write_text(script)
    return find_failing_code(catch(lambda: runpy.run_path(str(path), run_name="__main__")), since).sources


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def load(self): self.data = fetch()\n    def use(self): return self.data['x']\na = A()\n"
        "a.load()\na.use()",
        "DATA = {}\ndef load(): DATA.update(fetch())\ndef use(): return DATA['x']\nload()\nuse()",
        "def make():\n    data = fetch()\n    def use(): return data['x']\n    return use\nmake()()",
        "@functools.lru_cache\ndef load(): return fetch()\nload()['x']",
        "class A:\n    @property\n    def data(self): return fetch()\nA().data['x']",
        "for item in map(lambda _: fetch(), [1]):\n    item['x']",
        "class A:\n    def __getitem__(self, i): return fetch()\nfor item in iter(A()):\n    item['x']",
        "class A:\n    def __init__(self, data): self.data = data\n    def use(self): return self.data['x']\n"
        "A(fetch()).use()",
    ],
)
def test_values_are_followed_through_code_of_the_file(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "process" in find_sources_of(_FETCH + code, tmp_path, monkeypatch)
    own = _FETCH.replace("subprocess.getoutput('true')", "''") + code
    assert "process" not in find_sources_of(own, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "code",
    [
        "with open('latest') as file: step = int(file.read())",
        "def read():\n    with open('latest') as file: return file.read()\nstep = read().split()[0]",
        "from pathlib import Path\nstep = int((Path('.') / 'latest').read_text())",
        "import glob\nlast = sorted(glob.glob('ckpt-*'))[-1]",
    ],
)
def test_file_that_changed_since_the_start_is_a_source(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest").write_text("")
    assert "file" in find_sources_of(code, tmp_path, monkeypatch)
    assert "file" not in find_sources_of(code, tmp_path, monkeypatch, time.time() + 60)


def test_collective_that_fails_itself_has_received_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.broadcast(x, src=0)"
    assert "peers" not in find_sources_of(code, tmp_path, monkeypatch)


def test_address_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "network" in find_sources_of("SPEC = {'path': 's3://b/a'}\nint(SPEC)", tmp_path, monkeypatch)


@pytest.mark.parametrize(("device", "final"), [("cuda:0", False), ("cpu", True)])
def test_native_error_of_a_layer_on_a_gpu_may_pass(device: str, final: bool) -> None:
    facts = ExceptionFacts(
        ("RuntimeError", "Exception"),
        "FIND was unable to find an engine to execute this computation",
        place="/usr/lib/python3/site-packages/torch/nn/modules/conv.py",
        line="return F.conv2d(input, weight)",
        failing=FailingCode(device=device),
    )
    assert recurs(UNKNOWN_KIND, [facts], lasted=1.0, elastic=False) is final
