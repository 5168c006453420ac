"""A script in a forked rank behaves as under the plain interpreter; docs/pod-contract.md lists the differences."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_launcher_worker import SCRIPTS, SEES, ProgramResult
from tests.support.launcher_folder import RANK_MODULES, lay_out
from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

# Replaces the module of torchrun's agent: it runs one rank after the other, on request.
AGENT = """
import json, os, socket
def run_agent(fork, load_parts):
    channel = socket.socket(fileno=fork.descriptors[0])
    channel.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\\n")
    for line in channel.makefile():
        job = json.loads(line)
        with open("../out", "wb") as out, open("../err", "wb") as err:
            rank = fork.forker.fork(job["command"], job["environment"], (out, err))
        code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) if rank else None
        channel.sendall(json.dumps(code).encode() + b"\\n")
    os._exit(0)
"""
# Replaces the launcher.
LAUNCHER = """
import os, sys
life = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path.insert(0, sys.argv[1])
import launcher
launcher._register_package()
from ddp_launcher.contract import processes
from ddp_launcher.torchrun import fork_client
assert processes.adopt_orphans()
pid, requests = fork_client.start_fork_server(["script", "0", "room for the command line of a rank" * 20])
fork_client.request_fork(requests, {}, [int(sys.argv[2])])
os.read(life, 1)
"""
FORKSERVER = """
import multiprocessing

def double(value):
    return 2 * value

if __name__ == "__main__":
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
LOADS = """
class Numbers:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return 2 * index

if __name__ == "__main__":
    from torch.utils.data import DataLoader
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
"""
STATE = """
import atexit, ctypes, faulthandler, gc, logging, multiprocessing, os, signal, socket, sys, tempfile, threading
shown = {number: signal.getsignal(number) for number in signal.valid_signals()}
print({number: handler for number, handler in shown.items() if handler not in (0, None)})
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1), socket.getdefaulttimeout())
print(sys.stdin.read(), sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.name)
print(sorted(os.environ.items()) == sorted(os.environ.copy().items()), os.getcwd(), gc.isenabled(), sys.flags)
# PYTHONPATH has the folder by which the launcher observes the Python processes that a rank starts.
ours = ("DDP", "TORCH", "PYTEST", "LC_", "PYTHONPATH")
print({name: value for name, value in os.environ.items() if not name.startswith(ours)})
# The import of torch 2.8 adds a folder to sys.path, in a bare script too.
instantiator = sys.modules.get("torch.distributed.nn.jit.instantiator")
path = [folder for folder in sys.path if folder != getattr(instantiator, "INSTANTIATED_TEMPLATE_DIR_PATH", None)]
print(ctypes.CDLL(None).getenv(b"DDP_RUNTIME_DIR") != 0, tempfile.tempdir, path, sys.meta_path[-3:])
print([thread.name for thread in threading.enumerate()], threading.main_thread().name)
print(os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid())
print(multiprocessing.current_process(), multiprocessing.parent_process(), multiprocessing.get_start_method())
print(logging.root.handlers, logging.root.level, sys.excepthook, sys.displayhook, sys.gettrace(), sys.warnoptions)
print(sys.executable, sys.prefix, sys.getrecursionlimit(), sys.getswitchinterval())
"""
UNFINISHED = """
import atexit, os, sys, threading, time
written = open("unclosed", "w")
written.write("text that nobody flushes")
class Last:
    def __del__(self):
        print("deleted")
last = Last()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("end of the script")
"""
# A stand-in for triton, which PyTorch has only with CUDA: with it, a rank collects all objects at its end.
FROZEN = """
import gc, sys, types
sys.modules.setdefault("triton._C.libtriton", types.ModuleType("libtriton"))
class Last:
    def __del__(self, count=gc.get_freeze_count):
        print("frozen objects:", count())
last = Last()
"""
# Loads most of PyTorch: a process group, DDP and an optimizer, which imports TorchDynamo and triton.
TRAINS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
dist.destroy_process_group()
print("trained")
"""
OWN = {
    "frozen": FROZEN,
    "has a fork server": FORKSERVER,
    "state": STATE,
    "unfinished": UNFINISHED,
    "leaves with text": "import os, sys; sys.stdout.write('half a line'); os._exit(3)",
    "is killed": "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)",
    "forks": "import os, sys\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1] >> 8)\nelse: sys.exit(5)",
    "execs": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "sets early": "import os, sys; os.environ['OMP_NUM_THREADS'] = '3'; print('torch' in sys.modules)",
    "sets early by default": "import os, sys; os.environ.setdefault('MKL_CBWR', '3'); print('torch' in sys.modules)",
}


class Forked:
    """Runs an argument list as ``python`` would, directly or in a fork of a process that has imported PyTorch."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "folder"
        self.runtime = root / "runtime"
        launcher = lay_out(root / "mount", {"torchrun/launch.py": AGENT})
        self.folder.mkdir()
        for name in ("workers", "errors", "metrics", "stacks", "groups"):
            (self.runtime / name).mkdir(parents=True)
        self.launcher = str(launcher)
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "DDP_RUNTIME_DIR": str(self.runtime)}
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(launcher.parent), str(theirs.fileno())],
            cwd=self.folder,
            env=self.environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
        )
        theirs.close()
        self.channel = ours.makefile("rw")
        ours.close()
        self.agent = json.loads(self.channel.readline())["pid"]

    def clear(self) -> None:
        """Empty the folder of the forked processes."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for path in self.runtime.glob("*/*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def bare(self, *words: str) -> ProgramResult:
        ran = subprocess.run(
            [sys.executable, "-u", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return ProgramResult(ran.returncode, ran.stdout.decode(), ran.stderr.decode())

    def command(self, kind: str, *words: str) -> list[str]:
        return [sys.executable, "-u", self.launcher, "worker", kind, "0", *words]

    def fork(self, kind: str, *words: str, **environment: str) -> ProgramResult:
        job = {"command": self.command(kind, *words), "environment": {**self.environment, **environment}}
        self.channel.write(json.dumps(job) + "\n")
        self.channel.flush()
        code = json.loads(self.channel.readline())
        root = self.folder.parent
        return ProgramResult(code, (root / "out").read_text(), (root / "err").read_text())

    def close(self) -> None:
        self.channel.close()
        self.process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    forked = Forked(tmp_path_factory.mktemp("warm"))
    yield forked
    forked.close()


@pytest.fixture
def forked(server: Forked) -> Forked:
    server.clear()
    (server.folder / "neighbour.py").write_text("")
    package = server.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(SEES.replace("__spec__ is None", "__spec__.name, __package__"))
    (package / "__main__.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])\n")
    (package / "broken.py").write_text("raise ValueError('in a module')\n")
    return server


@pytest.mark.parametrize("name", [*SCRIPTS, *(f"own {name}" for name in OWN)])
def test_forked_script_behaves_as_in_plain_interpreter(forked: Forked, name: str) -> None:
    text = OWN[name[4:]] if name.startswith("own ") else SCRIPTS[name]
    (forked.folder / "script.py").write_text(text, encoding="latin-1" if name == "encoding" else "utf-8")
    assert forked.fork("script", "script.py", "a", "--b") == forked.bare("script.py", "a", "--b")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("module", ["-m", "package.train", "x"]),
        ("module", ["-m", "package"]),
        ("module", ["-m", "package.missing"]),
        ("module", ["-m", "package.broken"]),
        ("code", ["-c", "import sys; print(sys.argv, repr(sys.path[0]), __name__)", "x"]),
        ("code", ["-c", "1 / 0"]),
        ("script", ["package", "x"]),
        ("script", ["missing.py"]),
    ],
)
def test_other_forked_programs_behave_as_in_plain_interpreter(forked: Forked, kind: str, words: list[str]) -> None:
    assert forked.fork(kind, *(words if kind == "script" else words[1:])) == forked.bare(*words)


def test_forked_rank_that_trains_prints_what_a_plain_torchrun_rank_prints(forked: Forked) -> None:
    (forked.folder / "script.py").write_text(TRAINS)
    plain = forked.bare("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "script.py")
    assert (plain.code, plain.out.splitlines()[-1]) == (0, "trained"), plain.error
    assert forked.fork("script", "script.py") == plain


def test_data_loaders_start_their_workers_in_each_way(forked: Forked) -> None:
    (forked.folder / "script.py").write_text(LOADS)
    ran = forked.fork("script", "script.py")
    batches = "[[0, 2], [4, 6]]\n"
    assert ran == ProgramResult(0, f"fork {batches}spawn {batches}", "")


def test_ranks_agree_in_hashes(forked: Forked) -> None:
    hashes = {forked.fork("code", "print(hash('a'))").out for _ in range(2)}
    assert len(hashes) == 1


def test_forked_rank_has_torch_and_only_the_launchers_modules_for_ranks(forked: Forked) -> None:
    code = "import sys; print('torch._dynamo' in sys.modules, *sorted(n for n in sys.modules if 'ddp_launcher.' in n))"
    has_compiler, *names = forked.fork("code", code).out.split()
    assert has_compiler == "True"
    assert {name.split(".")[1] for name in names} == {"base", "contract", "features", "rank", "torchrun"}
    assert {name for name in names if ".features." in name} == set()  # the plan asks for none
    for name in (*RANK_MODULES, "rank.steps", "rank.collectives"):
        assert f"ddp_launcher.{name}" in names


def test_threads_and_torchruns_variables_take_effect(forked: Forked) -> None:
    code = "import os, torch, ctypes; print(torch.get_num_threads(), os.environ['RANK'], 'NOT_TORCHRUNS' in os.environ)"
    ran = forked.fork("code", code, RANK="7")
    assert ran.out.split() == ["1", "7", "False"]


def test_process_title_is_command_of_rank(forked: Forked) -> None:
    ran = forked.fork("code", "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0))[1:])")
    assert ran.out.startswith(str(["-u", forked.launcher, "worker", "code", "0"])[:-1])


@pytest.mark.parametrize(
    ("script", "neighbour", "reason"),
    [
        ("import os; os.environ['OMP_NUM_THREADS'] = '3'", "", "the script sets OMP_NUM_THREADS itself"),
        ("import os; os.environ.update({'TORCH_LOGS': '+dynamo'})", "", "the script sets TORCH_LOGS itself"),
        ("", "sympy.py", "sympy.py shadows a module that PyTorch imports"),
        ("import os; os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'", "", None),
        ("import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['OMP_NUM_THREADS'] == '1')", "", None),
        ("", "neighbour.py", None),
    ],
)
def test_script_with_obstacle_gets_fresh_interpreter(
    forked: Forked, script: str, neighbour: str, reason: str | None
) -> None:
    if neighbour:
        (forked.folder / neighbour).write_text("")
    (forked.folder / "script.py").write_text(f"import sys\nprint('torch' in sys.modules)\n{script}\n")
    ran = forked.fork("script", "script.py", TORCHELASTIC_RESTART_COUNT="0")
    assert ran.out.splitlines()[0] == str(reason is None)
    (said,) = ran.error.splitlines() or [""]
    assert (reason or "") in said
    assert forked.fork("script", "script.py", TORCHELASTIC_RESTART_COUNT="1").error == ""  # once is enough


def test_rank_dies_with_its_agent(tmp_path: Path) -> None:
    forked = Forked(tmp_path)
    (forked.folder / "script.py").write_text("import time; open('started', 'w').close(); time.sleep(600)")
    forked.channel.write(
        json.dumps({"command": forked.command("script", "script.py"), "environment": forked.environment}) + "\n"
    )
    forked.channel.flush()
    while not (forked.folder / "started").exists():
        time.sleep(0.01)
    family = psutil.Process(forked.agent).children()
    assert len(family) == 2  # the rank and its server
    os.kill(forked.agent, signal.SIGKILL)
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        time.sleep(0.01)
    forked.close()


TELLS = """
import os, pathlib, sys, time
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("restart", restart, "rank", rank, "warm", "torch" in sys.modules, flush=True)
if restart == "0" and rank == "0":
    # Not the words themselves: a warning with -X dev writes its source line into this log.
    while "rank 1 " + "warm" not in pathlib.Path("log-0").read_text() or os.path.exists("hold"):
        time.sleep(0.05)
    raise RuntimeError("once")
if restart == "0":
    time.sleep(600)
"""


def job(folder: Path, **options: Any) -> LauncherPods:
    (folder / "train.py").write_text(TELLS)
    return LauncherPods(folder, options.pop("command", ["train.py"]), nodes=1, nproc=2, max_restarts=1, **options)


@pytest.mark.parametrize(
    ("options", "warm", "said"),
    [
        ({}, True, ""),
        ({"config": {"warm_start": False}}, False, ""),
        ({"command": ["python", "-X", "dev", "train.py"]}, False, "options of the interpreter, -Xdev"),
    ],
    ids=["as it is", "switched off", "with options of the interpreter"],
)
def test_ranks_are_forked_at_start_and_restarts(tmp_path: Path, options: dict[str, Any], warm: bool, said: str) -> None:
    pods = job(tmp_path, **options)
    try:
        (ended,) = pods.run()
    finally:
        pods.stop()
    assert ended.code == 0, ended.log
    assert all(f"restart {n} rank {rank} warm {warm}" in ended.log for n in (0, 1) for rank in (0, 1)), ended.log
    assert ended.log.count("fresh interpreters") == bool(said)
    assert said in ended.log


def test_ranks_start_in_fresh_interpreters_after_end_of_server(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    pods = job(tmp_path)
    try:
        pods.start()
        pods.until(lambda: pods.log(0).count("restart 0") == 2, "both ranks run")
        (agent,) = (p for p in psutil.Process(pods.running[0].pid).children() if len(p.children()) == 3)
        (server,) = (p for p in agent.children() if not any("train.py" in word for word in p.cmdline()))
        server.kill()
        (tmp_path / "hold").unlink()
        ended = pods.wait(0)
    finally:
        pods.stop()
    assert ended.code == 0, ended.log
    assert ended.log.count("the ranks' fork server has ended") == 1
    assert "restart 1 rank 0 warm False" in ended.log
