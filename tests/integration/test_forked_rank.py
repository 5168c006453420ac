"""A forked rank is a fresh interpreter: one table of what a script can read, evaluated in both."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.test_launcher_dev import DevPods
from tests.support import PATIENCE
from tests.support.launcher_pods import LauncherPods

pytestmark = pytest.mark.process

Values = Mapping[str, str]

DISTINCT = {
    "random": "random.random()",
    "random: system": "random.SystemRandom().random()",
    "numpy: legacy": "numpy.random.random()",
    "numpy: generator": "numpy.random.default_rng().random()",
    "torch: seed": "torch.initial_seed()",
    "torch: noise": "torch.randn(2).tolist()",
    "torch: dropout": "torch.nn.Dropout()(torch.ones(64)).tolist()",
    "torch: base seed of a DataLoader": "iter(DataLoader(range(9)))._base_seed",
    "torch: order of a DataLoader": "[int(item) for item in DataLoader(range(99), shuffle=True)]",
    "torch: split": "list(random_split(range(99), [50, 49])[0].indices)",
    "sympy": "sympy.core.random.rng.random(), sympy.core.random._assumptions_rng.random()",
    "uuid": "uuid.uuid4()",
    "secrets": "secrets.token_hex()",
    "temporary file": "next(tempfile._get_candidate_names())",
    "multiprocessing: key": "bytes(multiprocessing.current_process().authkey)",
}
"""Differ between any two interpreters."""
SAME = {
    "torch: own generator": "torch.Generator().initial_seed()",
    "torch: accelerators": "torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(), len(torch.cuda._queued_calls), "
    "torch.xpu.is_initialized(), torch.xpu._is_in_bad_fork()",
    "torch: threads": "torch.get_num_threads(), torch.get_num_interop_threads()",
    "torch: defaults": "torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), "
    "torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(), "
    "torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, vars(torch._tensor_str.PRINT_OPTS)",
    "torch: multiprocessing": "torch.multiprocessing.get_sharing_strategy(), torch.utils.data.get_worker_info()",
    "numpy: errors": "numpy.geterr(), numpy.get_printoptions()",
    "decimal": "decimal.getcontext()",
    **{
        f"{name}: {aspect}": expression.format(name)
        for name in ("stdin", "stdout", "stderr")
        for aspect, expression in {
            "text": "type(sys.{0}), sys.{0}.encoding, sys.{0}.errors, sys.{0}.newlines, sys.{0}.mode, sys.{0}.name",
            "buffering": "sys.{0}.line_buffering, sys.{0}.write_through, type(sys.{0}.buffer), sys.{0}.buffer.mode",
            "file": "sys.{0}.isatty(), sys.{0}.seekable(), sys.{0}.buffer.seekable(), sys.{0}.fileno(), sys.{0}.closed",
            "position": "sys.{0}.tell() if sys.{0}.seekable() else None",
            "identity": "sys.{0} is sys.__{0}__",
            "change of the encoding": "sys.{0}.reconfigure(encoding=sys.{0}.encoding)",
        }.items()
    },
    "signals: handlers": "[(number, signal.getsignal(number)) for number in signal.valid_signals()]",
    # The C library uses two real-time signals itself, and changes them at each start of a process.
    "signals: ignored": "hex(int(read_status('SigIgn'), 16) & ~(3 << 31))",
    "signals: caught": "read_status('SigCgt')",
    "signals: blocked": "read_status('SigBlk')",
    "signals: wakeup": "signal.set_wakeup_fd(-1)",
    "signals: timers": "[signal.getitimer(number) for number in range(3)]",
    "signals: crashes": "faulthandler.is_enabled()",
    "limits": "[resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith('RLIMIT_')]",
    "limits: CPU": "os.nice(0), os.sched_getscheduler(0), os.sched_getaffinity(0)",
    "limits: memory": "open('/proc/self/oom_score_adj').read()",
    "limits: interpreter": "sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size()",
    "rights": "read_status('CapEff'), read_status('NoNewPrivs'), os.getresuid(), os.getresgid(), read_status('Umask')",
    "environment: Python and C": "all(os.environb[name] == libc.getenv(name) for name in os.environb)",
    "environment: C alone": "sorted(set(list_c_names()) - set(os.environb))",
    "environment: names": "sorted(n for n in os.environ if n.startswith(('PYTHON', 'OMP_', 'LC_', 'RANK', 'LOCAL_')))",
    "threads": "[thread.name for thread in threading.enumerate()], len(os.listdir('/proc/self/task'))",
    "threads: main": "threading.main_thread().ident == threading.get_ident(), "
    "threading.main_thread().native_id == os.getpid(), threading.Thread().name",
    "processes": "os.getsid(0) == os.getpid() == os.getpgrp(), multiprocessing.active_children(), subprocess._active",
    "descriptors": "list_descriptors()",
    "locale": "locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding(), "
    "sys.getfilesystemencodeerrors(), time.tzname",
    "folder": "os.getcwd()",
    "interpreter: flags": "sys.flags, sys._xoptions, sys.warnoptions, sys.dont_write_bytecode, sys.pycache_prefix",
    "interpreter: arguments": "sys.argv, [word for word in sys.orig_argv if word != os.environ['LOCAL_RANK']]",
    "interpreter: program": "sys.executable, sys.prefix, os.readlink('/proc/self/exe'), read_status('Name')",
    "interpreter: hooks": "sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, sys.gettrace()",
    "imports: main": "sys.modules['__main__'].__file__, sys.modules['__mp_main__'].__file__, __name__, __spec__",
    "imports: finders": "sys.meta_path, sys.path_hooks",
    "imports: path": "[folder for folder in sys.path if 'packages' not in folder]",
    "warnings": "warnings.filters, [name for name, module in sys.modules.items() if is_registry(module)]",
    "logging: root": "logging.root.handlers, logging.root.level, logging.root.manager.disable, logging.raiseExceptions",
    "logging: loggers": "[(n, logger.level, logger.handlers) for n, logger in list_loggers()]",
    "logging: streams": "[getattr(handler, 'stream', sys.stderr) is sys.stderr for handler in list_handlers()]",
    "logging: clock": "logging.makeLogRecord({}).relativeCreated < 1000 * seconds_since_start()",
    # A forked rank has one more, which does nothing without triton.
    "exit": "atexit._ncallbacks() - (gc.get_freeze_count() > 0)",
    "collector": "gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks",
    "multiprocessing": "multiprocessing.current_process(), multiprocessing.parent_process(), "
    "multiprocessing.Process().name, multiprocessing.get_start_method(allow_none=True), "
    "resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_pid",
    "time of the CPU": "time.process_time() < seconds_since_start()",
    "network": "socket.getdefaulttimeout()",
}
"""Equal in a rank that is forked and in the same rank in a fresh interpreter."""

# The fork server has imported torch and created an optimizer.
SCRIPT = r"""
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

import atexit, ctypes, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, random, re, resource
import secrets, signal, socket, subprocess, sys, tempfile, threading, time, uuid, warnings
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
import numpy.random, sympy.core.random
from torch.utils.data import DataLoader, random_split

rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p

def read_status(name):
    return re.search(name + r":\t(.*)", Path("/proc/self/status").read_text())[1]

def list_c_names():
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    index = 0
    while entries[index]:
        yield entries[index].partition(b"=")[0]
        index += 1

def list_descriptors():
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            yield number, os.readlink(f"/proc/self/fd/{number}"), os.get_inheritable(number), os.get_blocking(number)
        except OSError:
            pass  # of the listing itself

def list_loggers():
    loggers = sorted(logging.root.manager.loggerDict.items())
    return [(n, logger) for n, logger in loggers if isinstance(logger, logging.Logger) and logger.handlers]

def list_handlers():
    return [handler for _, logger in list_loggers() for handler in logger.handlers]

def is_registry(module):
    return bool(vars(module).get("__warningregistry__"))

def seconds_since_start():
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") + 0.1

def show(value):
    if hasattr(value, "__next__"):
        value = list(value)
    text = repr(value).replace(os.getcwd(), "FOLDER").replace(os.environ["DDP_RUNTIME_DIR"], "RUNTIME")
    text = re.sub("0x[0-9a-f]+", "ADDRESS", text)
    return re.sub("(RUNTIME/[a-z]+)/[0-9]+", r"\1/LOCAL_RANK", text)

def evaluate(expression):
    try:
        return show(eval(expression))
    except Exception as error:
        return f"raised {error!r}"

results = Path(RESULTS)
values = {name: evaluate(expression) for name, expression in TABLE.items()}
part = results / f"{KIND}-{restart}-{rank}.part"
part.write_text(json.dumps(values))
part.rename(part.with_suffix(".json"))
if FAILS and restart == "0":
    while rank == "0" and not (results / f"{KIND}-0-1.json").exists():
        time.sleep(0.05)
    if rank == "0":
        raise RuntimeError("once")
    time.sleep(600)
"""


def build_script(results: Path, kind: str, *, fails: bool = False) -> str:
    """Return the script that writes its values as ``kind``, the restart and its rank."""
    constants = {"RESULTS": str(results), "KIND": kind, "FAILS": fails, "TABLE": {**DISTINCT, **SAME}}
    return "\n".join(f"{name} = {value!r}" for name, value in constants.items()) + SCRIPT


def read_values(results: Path, name: str) -> Values:
    """Wait until a rank has written its values, and return them."""
    path = results / f"{name}.json"
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{name} wrote nothing"
        time.sleep(0.1)
    values: Values = json.loads(path.read_text())
    return values


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[None]:
    """Start a pod with one rank: an interpreter that torchrun starts. It writes its values as ``fresh``."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    (folder / "train.py").write_text(build_script(tmp_path, "fresh"))
    pods = LauncherPods(folder, ["train.py"], nodes=1, config={"warm_start": False}, warm=False)
    pods.start()
    yield
    pods.stop()


def compare(fresh: Values, forked: Mapping[str, Values]) -> None:
    """Compare ranks with the fresh interpreter, and all of them with each other."""
    processes = [fresh, *forked.values()]
    assert {name for values in processes for name, value in values.items() if value.startswith("raised")} == set()
    differences = {
        (name, rank): (values[name], fresh[name])
        for name in SAME
        for rank, values in forked.items()
        if values[name] != fresh[name]
    }
    assert differences == {}
    repeated = [name for name in DISTINCT if len({values[name] for values in processes}) < len(processes)]
    assert repeated == []


@pytest.mark.usefixtures("fresh")
def test_forked_rank_equals_fresh_interpreter_at_start_and_restart(tmp_path: Path) -> None:
    folder = tmp_path / "forked"
    folder.mkdir()
    (folder / "train.py").write_text(build_script(tmp_path, "forked", fails=True))
    pods = LauncherPods(folder, ["train.py"], nodes=1, nproc=2, max_restarts=1, warm=False)
    try:
        pods.start()
        names = [f"forked-{restart}-{rank}" for restart in (0, 1) for rank in (0, 1)]
        forked = {name: read_values(tmp_path, name) for name in names}
    finally:
        pods.stop()
    compare(read_values(tmp_path, "fresh-0-0"), forked)


@pytest.mark.usefixtures("fresh")
def test_forked_rank_equals_fresh_interpreter_in_another_run_of_held_pod(tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    job = DevPods(folder, 1, files={"train.py": build_script(tmp_path, "run")}, nproc=2)
    try:
        forked = {name: read_values(tmp_path, name) for name in ("run-0-0", "run-0-1")}
        job.until_held()
        list(job.order("run", {"train.py": build_script(tmp_path, "rerun")}))
        forked |= {name: read_values(tmp_path, name) for name in ("rerun-0-0", "rerun-0-1")}
    finally:
        job.stop()
    compare(read_values(tmp_path, "fresh-0-0"), forked)
