"""A script in the launcher's shim behaves as under the plain interpreter: its view, its output, its exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_pod.base.runtime_files import MAPPINGS
from ddp_pod.contract.command_line import split_python_line
from ddp_pod.rank.counter_slots import claim_slot, open_slot
from ddp_pod.rank.counters import PID, STEPS, CounterMemory
from ddp_pod.rank.end_notes import note_path, read_mapped_files
from tests.support.launcher_config import encoded_config
from tests.support.launcher_folder import RANK_MODULES, delivered_launcher

pytestmark = pytest.mark.process

SEES = """
import os, sys
print(__name__, __file__, sys.argv, sys.path[0], __spec__ is None, __doc__, sys.flags.optimize)
print(sorted(name for name in globals() if name != "__annotations__"), type(__loader__).__name__, __cached__)
print(sys.modules["__main__"].__dict__ is globals(), sys.modules["__main__"].__file__)
"""
SPAWNS = """
import multiprocessing, pickle

class Thing:
    def __init__(self, value):
        self.value = value

def double(thing):
    return Thing(2 * thing.value)

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing(3))).value == 3
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, [thing.value for thing in pool.map(double, [Thing(1), Thing(2)])])
"""
PIPES = "set -o pipefail; yes | head -1"
RAISES = """
import atexit, threading
atexit.register(print, "at exit")

def inner():
    raise KeyError("ä inner")

def outer():
    try:
        inner()
    except KeyError as error:
        raise ValueError("outer\\nof two lines") from error

thread = threading.Thread(target=print, args=("thread",))
thread.start()
outer()
"""
SCRIPTS = {
    "sees": SEES,
    "spawns": SPAWNS,
    "raises": RAISES,
    "syntax": "def broken(:\n",
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\u00e4'))\n",
    "exits with text": "import sys; sys.exit('no such thing')",
    "exits with 3": "raise SystemExit(3)",
    "exits with None": "import sys; sys.exit()",
    "exits with True": "import sys; sys.exit(True)",
    "exits with 300": "import sys; sys.exit(300)",
    "is interrupted": "raise KeyboardInterrupt",
    "leaves at once": "import os; os._exit(7)",
    "has a hook": "import sys\nsys.excepthook = lambda *about: print('hook', about[:2])\nraise ValueError('x')",
    "fails in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
    "has a group": "raise ExceptionGroup('many', [ValueError(1), KeyError(2)])",
    "has a bad message": "class Bad(Exception):\n    def __str__(self): raise RuntimeError\nraise Bad",
    "recurses": "import sys\ndef f(): f()\nsys.tracebacklimit = 3\nf()",
    "imports a neighbour": "import neighbour; print(neighbour.__name__)",
    "looks at itself": "import inspect, sys\ndef f():\n    return 1\nprint(inspect.getsource(f), inspect.getmodule(f))",
    "has annotations": "from __future__ import annotations\nx: int = 1\nimport typing\nclass A:\n    y: int\n"
    "print(typing.get_type_hints(A), __annotations__)",
    "uses dataclasses": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\nprint(A(1), A.__module__)",
    "warns": "import warnings; warnings.warn('careful')",
}


@dataclass
class ProgramResult:
    code: int
    out: str
    error: str


class Shim:
    """Runs an argument list as ``python`` would, directly or in the shim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "runtime"
        for name in ("workers", "errors", "metrics", "stacks"):
            (self.runtime / name).mkdir(parents=True)

    def bare(self, *words: str) -> ProgramResult:
        return self._run([sys.executable, "-u", *words], {})

    def shim(self, *words: str) -> ProgramResult:
        line = split_python_line(words)
        own = [sys.executable, "-u", *line.flags, str(delivered_launcher()), "worker"]
        return self._run([*own, line.kind, "0", line.target, *line.args], {"DDP_RUNTIME_DIR": str(self.runtime)})

    def _run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        process = subprocess.run(
            argv, cwd=self.folder, env={**os.environ, **env}, capture_output=True, stdin=subprocess.DEVNULL
        )
        return ProgramResult(
            process.returncode, process.stdout.decode(errors="replace"), process.stderr.decode(errors="replace")
        )

    def error(self) -> dict[str, Any]:
        path = self.runtime / "errors" / "0.json"
        value: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return value


@pytest.fixture
def shim(tmp_path: Path) -> Shim:
    (tmp_path / "neighbour.py").write_text("")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SEES.replace("__spec__ is None", "__spec__.name, __package__"))
    (package / "__main__.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])\n")
    (package / "broken.py").write_text("raise ValueError('in a module')\n")
    return Shim(tmp_path)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_behaves_as_in_plain_interpreter(shim: Shim, name: str) -> None:
    (shim.folder / "script.py").write_text(SCRIPTS[name], encoding="latin-1" if name == "encoding" else "utf-8")
    assert shim.shim("script.py", "a", "--b") == shim.bare("script.py", "a", "--b")


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "package.train", "x"],
        ["-m", "package"],
        ["-m", "package.missing"],
        ["-m", "missing"],
        ["-m", "package.broken"],
        ["-c", "import sys; print(sys.argv, repr(sys.path[0]), __name__)", "x"],
        ["-c", "1 / 0"],
        ["package", "x"],
        ["missing.py"],
        ["-O", "-W", "error", "-c", "assert False; import warnings; warnings.warn('x')"],
        ["-I", "-c", "import sys; print(sys.path)"],
        ["-P", "sub/script.py"],
        ["sub/script.py"],
        ["link.py"],
    ],
    ids=" ".join,
)
def test_other_programs_behave_as_in_plain_interpreter(shim: Shim, words: list[str]) -> None:
    (shim.folder / "sub").mkdir()
    (shim.folder / "sub" / "script.py").write_text("import sys\nprint(__file__, sys.path)\n")
    (shim.folder / "link.py").symlink_to("sub/script.py")
    bare = shim.bare(*words)
    shimmed = shim.shim(*words)
    if words[0] == "-P":  # nor is the launcher's own folder in the path
        assert "ddp-launcher-" not in shimmed.out
    assert shimmed == bare


def test_exception_writes_error_file(shim: Shim) -> None:
    (shim.folder / "script.py").write_text(RAISES)
    shim.shim("script.py")
    error = shim.error()
    assert (error["type"], error["message"], error["exitCode"]) == ("ValueError", "outer\nof two lines", 1)
    assert "ä inner" in error["traceback"]
    assert "ddp-launcher-" not in error["traceback"]
    assert (error["rank"], error["localRank"], error["restart"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import sys; sys.exit(85)", ("SystemExit", "85", 85)),
        ("import sys; sys.exit('text')", ("SystemExit", "text", 1)),
        ("import json; json.loads('{')", ("json.decoder.JSONDecodeError", None, 1)),
        ("import sys; sys.exit(0)", None),
        ("pass", None),
        ("import os\nif os.fork() == 0:\n    raise ValueError('in a child')\nos.wait()", None),
        ("import os; os._exit(3)", None),
    ],
)
def test_exit_of_forked_child_writes_no_error_file(shim: Shim, script: str, expected: Any) -> None:
    (shim.runtime / "errors" / "0.json").write_text("{}")  # of an earlier restart
    (shim.folder / "script.py").write_text(script)
    shim.shim("script.py")
    error = shim.error()
    if expected is None:
        assert error == {}
    else:
        kind, message, code = expected
        assert (error["type"], error["exitCode"]) == (kind, code)
        assert message in (None, error["message"])


def test_error_file_of_script_is_kept(shim: Shim) -> None:
    write = "import os; open(os.environ['DDP_RUNTIME_DIR'] + '/errors/0.json', 'w').write('{\"type\": \"mine\"}')\n"
    (shim.folder / "script.py").write_text(write + "raise ValueError")
    shim.shim("script.py")
    assert shim.error() == {"type": "mine"}


def test_worker_records_itself(shim: Shim) -> None:
    (shim.folder / "script.py").write_text("import os; print(os.getpid())")
    pid = int(shim.shim("script.py").out)
    about = json.loads((shim.runtime / "workers" / "0.json").read_text())
    assert (about["pid"], about["rank"], about["localRank"], about["worldSize"]) == (pid, 0, 0, 1)


def test_program_starts_with_the_dispositions_of_a_shell(shim: Shim) -> None:
    own = [sys.executable, str(delivered_launcher()), "worker", "program", "0", "bash", "-c", PIPES]
    assert shim._run(own, {"DDP_RUNTIME_DIR": str(shim.runtime)}) == ProgramResult(141, "y\n", "")


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/", 126)])
def test_program_that_cannot_start_has_exit_code_of_shell(shim: Shim, program: str, code: int) -> None:
    own = [sys.executable, str(delivered_launcher()), "worker", "program", "0", program]
    assert shim._run(own, {"DDP_RUNTIME_DIR": str(shim.runtime)}).code == code


def test_modules_of_launcher_do_not_shadow_modules_of_user(tmp_path: Path) -> None:
    """Behind a ConfigMap's links Python puts the folder under its real name into the path."""
    env = {**os.environ, "TMPDIR": str(tmp_path), **encoded_config()}
    argv = [sys.executable, str(delivered_launcher()), "run", "--", "-m", "metrics"]
    ran = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ran.returncode == 81
    assert "training module not found: metrics" in ran.stderr


def test_rank_compiles_few_modules_of_launcher(shim: Shim) -> None:
    code = "import sys; print(*sorted(n for n in sys.modules if n.startswith('ddp_launcher.')))"
    names = shim.shim("-c", code).out.replace("ddp_launcher.", "").split()
    assert names == RANK_MODULES


PROGRAM = """
python -c 'print("no torch here")'
python first.py &
wait $!
python -I first.py
python second.py
"""
TRAINS = """
import mmap, os, sys, torch
with open("tokens.bin", "w+b") as file:
    file.truncate(1 << 20)
    tokens = mmap.mmap(file.fileno(), 0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(STEPS):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
print(sys.modules["sitecustomize"].__file__ if "sitecustomize" in sys.modules else None)
"""


def test_python_processes_of_program_count_their_steps(shim: Shim) -> None:
    (shim.folder / "first.py").write_text(TRAINS.replace("STEPS", "3"))
    (shim.folder / "second.py").write_text(TRAINS.replace("STEPS", "5"))
    own = shim.folder / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own sitecustomize')")
    memory = CounterMemory(str(shim.runtime), 2)
    (shim.runtime / "output").mkdir()
    argv = [sys.executable, str(delivered_launcher()), "worker", "program", "1", "bash", "-ec", PROGRAM]
    python = os.path.dirname(sys.executable)
    env = {"PYTHONPATH": str(own), "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    ran = shim._run(argv, {"DDP_RUNTIME_DIR": str(shim.runtime), "RANK": "7", "WORLD_SIZE": "8", **env})
    assert ran.code == 0, ran.error
    assert ran.out.count("own sitecustomize") == 4, "in the shim and in three processes that do not ignore it"
    counted = memory.read(1)
    assert counted is not None
    assert (counted.steps, counted.rank, counted.world_size, counted.learning_rate) == (5, 7, 8, 0.5)
    assert counted.pid == json.loads((shim.runtime / "workers" / "1.json").read_text())["pid"]
    assert counted.loss is not None
    assert memory.read(0) is None
    mapped = {file.path: file.end for file in read_mapped_files(note_path(str(shim.runtime), 1, MAPPINGS))}
    assert mapped[str(shim.folder / "tokens.bin")] == 1 << 20, "read at the first step, before the data can change"


def test_exception_of_a_python_process_of_a_program_is_recorded(shim: Shim) -> None:
    (shim.folder / "fail.py").write_text("import torch\nlosses = []\nlosses[3]\n")
    (shim.runtime / "output").mkdir()
    (shim.runtime / "output" / "1.error").write_text("of the former process")
    argv = [sys.executable, str(delivered_launcher()), "worker", "program", "1", "bash", "-c", "python fail.py"]
    env = {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}", "RANK": "7"}
    ran = shim._run(argv, {"DDP_RUNTIME_DIR": str(shim.runtime), "WORLD_SIZE": "8", **env})
    plain = subprocess.run(
        [sys.executable, "fail.py"], cwd=shim.folder, capture_output=True, text=True, check=False, env=os.environ
    )
    assert (ran.code, ran.error) == (1, plain.stderr)
    record = json.loads((shim.runtime / "output" / "1.error").read_text())
    assert (record["type"], record["rank"], record["exitCode"]) == ("IndexError", 7, 1)
    assert record["chain"][0]["failing"][:3] == ["losses[3]", "len(losses) > 3", "losses: []"]


def test_second_process_does_not_count_beside_first(tmp_path: Path) -> None:
    memory = CounterMemory(str(tmp_path), 1)
    open_slot(str(tmp_path), 0)[PID] = 11.0
    slot = claim_slot(str(tmp_path), 0)
    assert slot is not None
    slot[STEPS] = 2.0
    assert claim_slot(str(tmp_path), 0) is None
    found = memory.read(0)
    assert found is not None
    assert (found.pid, found.steps, found.is_counted) == (11, 2, True)
