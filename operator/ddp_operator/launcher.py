"""The first process of every training pod: it runs torchrun, and says in one place how the pod ended and why.

One file, standard library only: the operator mounts it into any image that has Python >= 3.9 and torch >= 2.2.

    launcher.py run <torchrun flags> -- <what follows `python` on its command line>
    launcher.py run <torchrun flags> --no-python -- <program> …
    launcher.py worker …            (internal: what torchrun starts for each rank)

Processes of a pod, each of which dies with the one before it:

    launcher (standard library)  ->  torchrun's agent (forked, imports torch)  ->  workers (through the shim below)
                                     on pod 0 also the rendezvous store, forked from the agent after the import

``docs/pod-contract.md`` has the environment, the exit codes and the files that this program reads and writes.
"""

from __future__ import annotations

import signal
import sys

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS: list[int] = []  # that have come and are not obeyed yet
if __name__ == "__main__" and sys.argv[1:2] == ["run"]:
    # The kernel drops what a container's first process has no handler for: a pod that is deleted in its first moments
    # would go on for its whole grace time. So this comes before all that takes a while.
    for _number in _STOP_SIGNALS:
        signal.signal(_number, lambda received, frame: _SIGNALS.append(received))

import errno
import importlib
import itertools
import json
import math
import os
import re
import select
import socket
import threading
import time
from typing import Any, Callable, Iterable, NamedTuple, NoReturn, Sequence

# ---- names shared with the operator (ddp_operator/constants.py; tests/contract keeps them equal) --------------------

ENV_COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
ENV_NODES = "DDP_NODES"
ENV_METRICS_PORT = "DDP_METRICS_PORT"
ENV_GRACE_SECONDS = "DDP_GRACE_SECONDS"
ENV_JOIN_TIMEOUT = "DDP_JOIN_TIMEOUT_SECONDS"
ENV_NON_RETRYABLE = "DDP_NON_RETRYABLE_EXIT_CODES"
ENV_TERMINATION_LOG = "DDP_TERMINATION_LOG"
ENV_WATCHDOG = "DDP_WATCHDOG"
ENV_LOG_PATTERNS = "DDP_LOG_PATTERNS"
ENV_EPOCHS = "DDP_EPOCHS"
ENV_PREFLIGHT = "DDP_PREFLIGHT"
ENV_SUCCESS_POLICY = "DDP_SUCCESS_POLICY"
ENV_MASTER_ADDR = "MASTER_ADDR"
ENV_MASTER_PORT = "MASTER_PORT"
ENV_OMP_NUM_THREADS = "OMP_NUM_THREADS"
ENV_NPROC_PER_NODE = "DDP_NPROC_PER_NODE"
ENV_RUNTIME_DIR = "DDP_RUNTIME_DIR"
ENV_PORT_FILE = "DDP_PORT_FILE"  # where to write the metrics port that was taken
ENV_LIFELINE_FD = "DDP_LIFELINE_FD"  # a descriptor whose end of file means: the owner of this pod is gone

EXIT_OK = 0
EXIT_USER_ERROR = 81
EXIT_RETRYABLE = 82
EXIT_HANG = 83
EXIT_OOM = 84
EXIT_PREEMPTED = 85
EXIT_PEER_LOST = 86

CATEGORY_USER_ERROR = "UserError"
CATEGORY_OOM = "OOM"
CATEGORY_CUDA = "CUDAError"
CATEGORY_NCCL = "NCCL"
CATEGORY_NETWORK = "Network"
CATEGORY_HANG = "Hang"
CATEGORY_PREEMPTED = "Preempted"
CATEGORY_UNKNOWN = "Unknown"

DEFAULT_RENDEZVOUS_PORT = 29400
TERMINATION_MESSAGE_LIMIT = 4096
METRIC_LAUNCHER_PHASE = "ddp_launcher_phase"
METRIC_LAUNCHER_RESTARTS = "ddp_launcher_in_place_restarts_total"
COMMENT_LAST_FAILURE = "# ddp_launcher_last_failure "
METRIC_HEARTBEAT_AGE = "ddp_launcher_heartbeat_age_seconds"
METRIC_HANGS = "ddp_launcher_hangs_total"
METRIC_STALLED = "ddp_launcher_stalled_seconds"
METRIC_STALLED_RANK = "ddp_launcher_stalled_rank"
METRIC_PREFLIGHT_PASSED = "ddp_launcher_preflight_passed"
METRIC_PREFLIGHT_SECONDS = "ddp_launcher_preflight_seconds"
METRIC_ALL_REDUCE_RATE = "ddp_launcher_all_reduce_bytes_per_second"
METRIC_GLOBAL_STEP = "ddp_step"
METRIC_STEPS = "ddp_steps_total"
METRIC_STEP_SECONDS = "ddp_step_seconds_sum"
METRIC_WORLD_SIZE = "ddp_world_size"
METRIC_HEARTBEATS = "ddp_heartbeats_total"
METRIC_SAVING = "ddp_saving"
STALLED_STATES = ("Stopped", "Behind", "Busy", "Waiting")
LAUNCHER_PHASES = ("Starting", "WaitingForMaster", "Rendezvous", "Running", "Stopping", "Done")

_AGENT_PID = "DDP_AGENT_PID"
# Asks a worker for its stack. SIGUSR1 would be the script's own, which may save and end on it, as it does under Slurm.
_STACK_SIGNAL = int(signal.SIGRTMAX) - 2 if hasattr(signal, "SIGRTMAX") else int(signal.SIGUSR1)
_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_STOPPING = "stopping"  # a file of the runtime directory
_STALL_REPORT = "stall.json"  # another one: what the watchdog has found, for the agent to exchange with the other pods
_LOCAL_POD = "DDP_LOCAL_POD"  # set in every process of a pod under `ddp run`
_OUTPUT_FLAGS = ("--tee", "-t", "--redirects", "-r", "--logs-specs")
_LOG_PREFIX = "DDP_LOG_PREFIX"  # the user's own: 0 leaves the lines of a pod with several ranks as they are
_SECONDS_AFTER_GRACE = 5.0
_SECONDS_WITHOUT_WORKERS = 1.0  # an agent that has nobody left to wait for needs no more after a signal
_SECONDS_TO_LEAVE = 5.0  # and in an elastic job so long to say good-bye, for which the others otherwise wait in vain
_LINGER_SECONDS = 3.0
_REPEATED, _NEW = b"r", b"n"  # the launcher's answer to the agent's report of failures
_SECONDS_FOR_ANSWER = 10.0
_SECONDS_WITHOUT_STORE = 5.0
_SECONDS_FOR_ENDS = 5.0  # that pods which have trained together may end one after another
_SECONDS_FOR_STORE = 2.0
_LAST_BARRIER = "torchelastic/agent/terminal_state/num_members"  # torchrun's key, in the store of a round
_SECONDS_TO_SETTLE = 0.2
_SECONDS_TO_READ = 30.0  # for the reader to pass on what ended workers have written
_LASTED_SECONDS = 300.0  # workers that report no steps and ran so long have done something
_PEERS_MOVE = "other pods join or leave"
_FREE_RESTARTS = 100  # in place and after losing a peer, in an elastic job: more than that is no accident
_FIRST_CALL_SECONDS = 30.0  # how long an elastic job waits for its first pods once there are enough to begin
_GONE_SECONDS = 1.0  # after which a pod that shows no sign of life is not waited for when the others meet again
_PAGE_LIMIT = 1 << 20
_PAGE_TIMEOUT = 1.0
_PROGRESS_LIMIT = 30


def log(text: str) -> None:
    """Write lines of the launcher's own to stderr, each marked, in one piece."""
    sys.stderr.write("".join(f"[launcher] {line}\n" for line in text.splitlines()))
    sys.stderr.flush()


# ---- the user's command line ----------------------------------------------------------------------------------------


class PythonLine(NamedTuple):
    """What follows ``python`` on its command line. ``kind`` is script, module or code."""

    flags: list[str]
    kind: str
    target: str
    args: list[str]


def split_python_line(words: Sequence[str]) -> PythonLine:
    """Split interpreter flags, program and arguments as CPython does. Raises: ValueError."""
    flags: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "-":
            raise ValueError("reads the script from standard input, which a pod does not have")
        if not word.startswith("-"):
            return PythonLine(flags, "script", word, rest)
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs" and rest:
                flags.append(rest.pop(0))
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter not in "mcWX":
                continue
            value = word[place + 1 :]
            if not value:
                if not rest:
                    raise ValueError(f"-{letter} needs a value")
                value = rest.pop(0)
            if place > 1:
                flags.append(word[:place])
            if letter in "mc":
                return PythonLine(flags, {"m": "module", "c": "code"}[letter], value, rest)
            flags.append(f"-{letter}{value}")
            break
        else:
            flags.append(word)
    raise ValueError("names no script")


def find_missing_program(line: PythonLine | None, program: Sequence[str]) -> str | None:
    """Return the complaint when what the user wants to run is not there, before torch is even imported."""
    hint = "check command and args in spec.template"
    if line is None:
        import shutil  # only here: the common case should not pay for it

        return None if shutil.which(program[0]) else f"program not found: {program[0]} (looked in PATH); {hint}"
    if line.kind == "script" and not os.path.exists(line.target):
        return f"training script not found: {line.target} (looked in {os.getcwd()}); {hint}"
    if line.kind == "module" and not line.flags:
        from importlib import util

        sys.path.insert(0, os.getcwd())
        try:
            found = util.find_spec(line.target.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            return f"training module not found: {line.target} (looked in {os.getcwd()} and site-packages); {hint}"
    return None


# ---- the pod --------------------------------------------------------------------------------------------------------


class WatchdogPlan(NamedTuple):
    """Budgets in seconds, and what follows when one is used up. ``action`` is Restart, Fail or Report."""

    start: float
    stall: float
    checkpoint: float
    action: str


def read_watchdog(text: str) -> WatchdogPlan | None:
    """Read ``start=900,stall=300,checkpoint=1800,action=Restart``. Raises: ValueError."""
    if not text:
        return None
    words = dict(word.partition("=")[::2] for word in text.split(","))
    try:
        start, stall, checkpoint = (float(words[name]) for name in ("start", "stall", "checkpoint"))
        return WatchdogPlan(start, stall, checkpoint, words["action"])
    except (KeyError, ValueError):
        raise ValueError(f"{ENV_WATCHDOG}={text!r} is not start=…,stall=…,checkpoint=…,action=…") from None


class Pod(NamedTuple):
    """What the environment says about this pod."""

    node: int
    nodes: int
    master: str
    port: int
    grace: float
    join_timeout: float
    non_retryable: list[int]
    metrics_port: int
    runtime: str
    oom_kills: int
    watchdog: WatchdogPlan | None = None
    log_patterns: tuple[str, ...] = ()
    epochs: int | None = None
    nproc: int = 1
    preflight: PreflightPlan | None = None
    elastic: bool = False
    program: bool = False
    success_policy: str = "AllNodes"

    @property
    def local(self) -> bool:
        """Whether all pods are on this machine (`ddp run`)."""
        return self.master == "localhost" or self.master.startswith("127.")


def read_pod(env: dict[str, str], runtime: str) -> Pod:
    """Return the pod. Raises: ValueError that names the variable."""

    def number(name: str, default: str) -> float:
        try:
            return float(env.get(name) or default)
        except ValueError:
            raise ValueError(f"{name}={env[name]!r} is not a number") from None

    return Pod(
        node=int(number(ENV_COMPLETION_INDEX, "0")),
        nodes=int(number(ENV_NODES, "1")),
        master=env.get(ENV_MASTER_ADDR) or "127.0.0.1",
        port=int(number(ENV_MASTER_PORT, str(DEFAULT_RENDEZVOUS_PORT))),
        grace=number(ENV_GRACE_SECONDS, "30"),
        join_timeout=number(ENV_JOIN_TIMEOUT, "600"),
        non_retryable=[int(code) for code in re.findall(r"\d+", env.get(ENV_NON_RETRYABLE, ""))],
        metrics_port=int(number(ENV_METRICS_PORT, "0")),
        runtime=runtime,
        oom_kills=count_oom_kills(),
        watchdog=read_watchdog(env.get(ENV_WATCHDOG, "")),
        log_patterns=tuple(json.loads(env.get(ENV_LOG_PATTERNS) or "[]")),
        epochs=int(number(ENV_EPOCHS, "0")) or None,
        nproc=int(number(ENV_NPROC_PER_NODE, "1")),
        preflight=read_preflight(env.get(ENV_PREFLIGHT, "")),
        success_policy=env.get(ENV_SUCCESS_POLICY) or "AllNodes",
    )


def loopback_address(index: int) -> str:
    """Return the address of a pod on this machine. Lexical order is the order of the indices: torchrun ranks by it."""
    return "127.0.0.1" if index == 0 else f"127.0.{100 + index // 100}.{100 + index % 100}"


def add_pod_flags(flags: Sequence[str], pod: Pod) -> list[str]:
    """Return torchrun's flags with what only the pod knows. Later flags win: the pod's come last, a default first."""
    flags = ["--monitor-interval=0.1", *flags]  # 5 s in older versions: a failure would be seen late
    static = any(flag == "--rdzv-backend=static" for flag in flags)
    if static:
        return [*flags, f"--master-addr={pod.master}", f"--master-port={pod.port}", f"--node-rank={pod.node}"]
    if pod.nodes == 1 and not pod.elastic:
        return [*flags, "--rdzv-endpoint=localhost:0", "--local-addr=127.0.0.1"]
    host = "localhost" if pod.node == 0 else pod.master
    address = [f"--local-addr={loopback_address(pod.node)}"] if pod.local else []
    return [*flags, f"--rdzv-endpoint={host}:{pod.port}", *address]


def default_threads(nproc: str) -> str | None:
    """Return OMP_NUM_THREADS for workers where nobody set it: the cgroup's CPUs shared out, else as torchrun does."""
    if not nproc.isdigit():
        return None
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            return str(max(1, math.floor(int(quota) / int(period) / int(nproc))))
    except (OSError, ValueError):
        pass
    return "1" if int(nproc) > 1 else None


def count_oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for memory."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            with open(path, encoding="ascii") as file:
                found = re.search(r"^oom_kill (\d+)", file.read(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def has_gpu() -> bool:
    """Tell whether this pod has been given a device of NVIDIA's; where that is broken, another node may do better."""
    try:
        return any(re.fullmatch(r"nvidia\d+", name) for name in os.listdir("/dev"))
    except OSError:
        return False


def prctl(option: int, value: int) -> None:
    """Call prctl(2) where there is one."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when ``parent`` dies; it may be dead already."""
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(137)


# ---- the worker shim: every rank starts here, and then is the user's program ----------------------------------------


def worker_main(words: Sequence[str]) -> NoReturn:
    """``worker <kind> <local rank> <target> …``: become the user's program."""
    kind, local_rank, target, args = words[0], words[1], words[2], list(words[3:])
    die_with(int(os.environ.pop(_AGENT_PID, os.getppid())))
    runtime = os.environ[ENV_RUNTIME_DIR]
    divert_output(os.path.join(runtime, "output", local_rank))
    error_file = os.path.join(runtime, "errors", f"{local_rank}.json")
    metrics = os.path.join(runtime, "metrics", local_rank)
    group_file = os.path.join(runtime, "groups", f"{local_rank}.json")
    for stale in (error_file, group_file, f"{metrics}.port", f"{metrics}.prom", f"{metrics}.log"):
        try:
            os.unlink(stale)
        except OSError:
            pass
    about = {
        "pid": os.getpid(),
        "rank": int(os.environ.get("RANK", "0")),
        "localRank": int(local_rank),
        "worldSize": int(os.environ.get("WORLD_SIZE", "1")),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "started": time.time(),
        "kind": kind,
    }
    write_json(os.path.join(runtime, "workers", f"{local_rank}.json"), about)
    if kind == "program":
        try:
            os.execvp(target, [target, *args])  # noqa: S606
        except OSError as error:
            sys.stderr.write(f"{target}: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127 if error.errno == errno.ENOENT else 126)
    import faulthandler

    stacks = os.open(os.path.join(runtime, "stacks", local_rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    # Not those of all threads: faulthandler walks their list without a lock, and where one of them just ends, such as
    # that of an answered scrape, the rank crashes (1 of 230 times). The kernel gives the signal to the main thread.
    faulthandler.register(_STACK_SIGNAL, file=stacks, all_threads=False, chain=False)
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in native code says at least where the script was
    pid = os.getpid()
    groups = GroupRecorder(group_file)
    sys.meta_path.insert(0, groups)
    try:
        _run_python(kind, target, args)
    except BaseException as error:
        if os.getpid() == pid:
            if isinstance(error, SystemExit) and not error.code:
                groups.close()
            _record_exception(error, error_file, about)
        _hide_own_frames()
        raise
    if os.getpid() == pid:
        groups.close()
    raise SystemExit(0)


class GroupRecorder:
    """Records the size of the default process group that a rank's program initializes, without importing torch.

    A finder of modules, it steps aside when torch.distributed is loaded. Forked children of the rank record as well.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._blind = False  # this torch is another one

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Let the others find the module of torch's process groups, and watch it once it is loaded."""
        if name != _GROUPS_MODULE:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec: Any = next((one for one in found if one is not None), None)
        try:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                self._watch(module)

            spec.loader.exec_module = execute_and_watch
        except AttributeError:
            self._blind = True
        return spec

    def _watch(self, module: Any) -> None:
        update = getattr(module, "_update_default_pg", None)
        if update is None:
            self._blind = True
            return

        def update_and_record(group: Any) -> Any:
            result = update(group)
            try:
                self._record(int(group.size()))
            except (AttributeError, TypeError, ValueError, OSError):
                pass  # no group any more, or none of this rank's
            return result

        module._update_default_pg = update_and_record

    def _record(self, size: int) -> None:
        if size > read_json(self._path).get("size", 0):
            write_json(self._path, {"size": size})

    def close(self) -> None:
        """Record that there was no group, where that is certain: of a program that has ended well by itself."""
        if self._blind or os.path.exists(self._path) or any(name in sys.modules for name in _OTHER_WAYS):
            return
        import resource

        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        if children.ru_utime + children.ru_stime > own.ru_utime + own.ru_stime:
            return  # other programs have done the work
        try:
            write_json(self._path, {"size": 0})
        except OSError:
            pass


_GROUPS_MODULE = "torch.distributed.distributed_c10d"
# Interpreters that are started anew, and frameworks with communication of their own: what they do is not seen.
_OTHER_WAYS = (
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_forkserver",
    "jax",
    "mpi4py",
    "horovod",
    "ray",
)


def _run_python(kind: str, target: str, args: list[str]) -> None:
    """Run the user's program as ``__main__``, as the interpreter itself would."""
    import builtins
    import types

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    launcher, sys.modules["__main__"] = sys.modules["__main__"], main
    main.__dict__["__loader__"] = None
    sys.argv = [target, *args]
    unsafe = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    if kind == "module":
        if unsafe:
            sys.path[0] = os.getcwd()
        sys.argv[0] = "-m"
        importlib.import_module("runpy")._run_module_as_main(target)
    elif kind == "code":
        if unsafe:
            sys.path[0] = ""
        sys.argv[0] = "-c"
        exec(compile(target, "<string>", "exec"), main.__dict__)  # noqa: S102 # nosec B102
    elif os.path.isdir(target) or (not target.endswith(".py") and _is_archive(target)):
        sys.path[:1] = [os.path.abspath(target), *([] if unsafe else sys.path[:1])]
        importlib.import_module("runpy")._run_module_as_main("__main__", False)
    else:
        if unsafe:
            sys.path[0] = os.path.dirname(os.path.realpath(target))
        from importlib.machinery import SourceFileLoader

        try:
            target = os.path.abspath(target)
            with open(target, "rb") as file:
                source = file.read()
        except OSError as error:
            sys.stderr.write(f"{sys.executable}: can't open file {target!r}: [Errno {error.errno}] {error.strerror}\n")
            raise SystemExit(2) from error
        vars(main).update(__file__=target, __cached__=None, __loader__=SourceFileLoader("__main__", target))
        exec(compile(source, target, "exec"), main.__dict__)  # noqa: S102 # nosec B102
    del launcher  # alive until here, so that its globals are too


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _own_frames_removed(error: BaseException, trace: Any) -> Any:
    users = trace
    while users is not None and users.tb_frame.f_globals is globals():
        users = users.tb_next
    return users if users is not None or isinstance(error, SyntaxError) else trace


def _hide_own_frames() -> None:
    """Let the interpreter show the traceback as if the launcher were not there."""
    hook = sys.excepthook

    def show(kind: Any, value: Any, trace: Any) -> None:
        trace = _own_frames_removed(value, trace)
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def _record_exception(error: BaseException, path: str, about: dict[str, Any]) -> None:
    """Write the error file, unless the script wrote one itself or ends well."""
    code: Any = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code == 0:
            return
    if os.path.exists(path):
        return
    import traceback

    kind, message = _name_exception(error)
    shown = error
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        message, shown = _explain_exit(error)
    if isinstance(shown, PermissionError):
        message += explain_permission(shown)
    trace = traceback.format_exception(type(shown), shown, _own_frames_removed(shown, shown.__traceback__))
    text = fold_libraries("".join(trace))[-16384:]
    record = {"type": kind, "message": message, "traceback": text, "exitCode": code & 255}
    record.update(rank=about["rank"], localRank=about["localRank"], restart=about["restart"], time=time.time())
    try:
        write_json(path, record)
    except OSError:
        pass  # a full disk must not hide the exception itself


_MESSAGE_PART = 4096  # characters kept of a long message's beginning, and of its end


def _name_exception(error: BaseException) -> tuple[str, str]:
    """Return an exception's type, with its module unless that is known to all, and its message."""
    kind = type(error)
    place = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error)
    except Exception:
        message = "<the exception cannot be shown>"
    if len(message) > 2 * _MESSAGE_PART:  # a helper's whole traceback says at its end what went wrong
        message = f"{message[:_MESSAGE_PART]}\n...\n{message[-_MESSAGE_PART:]}"
    return place + kind.__qualname__, message


_PLACE = re.compile(r'  File "([^"]*)", line (\d+)')
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]|^<frozen ")
_SHORT_TRACEBACK = 15  # lines
_LIBRARY_CALLS_KEPT = 2


def fold_libraries(text: str) -> str:
    """Return a long traceback without most calls inside libraries: what is kept of it is a tail, which shall hold the
    script's own lines. The log has the whole."""
    blocks: list[tuple[bool | None, str]] = []  # a library's call, the script's own, or None for any other line
    for line in text.splitlines(True):
        place = _PLACE.match(line)
        if place:
            blocks.append((bool(_LIBRARY.search(place[1])), line))
        elif blocks and blocks[-1][0] is not None and line.startswith("  "):
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + line)
        else:
            blocks.append((None, line))
    runs = [(kind, [block for _, block in run]) for kind, run in itertools.groupby(blocks, lambda block: block[0])]
    if text.count("\n") <= _SHORT_TRACEBACK or all(kind is not False for kind, _ in runs):
        return text
    shown = []
    for number, (kind, run) in enumerate(runs):
        last = number + 1 == len(runs) or runs[number + 1][0] is None
        kept = _LIBRARY_CALLS_KEPT if last else 0
        if kind and len(run) > kept + 1:
            shown.append(f"  ... {len(run) - kept} calls inside libraries ...\n")
            run = run[len(run) - kept :]
        shown += run
    return "".join(shown)


def _explain_exit(error: SystemExit) -> tuple[str, BaseException]:
    """Return why a script ended itself with a mere number, and whose traceback shows it.

    Many wrappers (hydra's is one) write what went wrong to the log, and then exit: the exception they had caught is
    the cause, and tells a victim of another rank from a culprit.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_globals.get("__name__") == "argparse":
        said = trace.tb_frame.f_locals.get("message")
        if isinstance(said, str):
            return said.strip(), error
    caught = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if isinstance(caught, Exception):
        return ": ".join(filter(None, _name_exception(caught))), caught
    return str(error), error


def explain_permission(error: PermissionError) -> str:
    """Return who was denied what: the process's user and groups, and the owner and mode of the path."""
    groups = ",".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    words = f"process of uid {os.geteuid()}, groups {groups}"
    place = os.path.abspath(error.filename) if isinstance(error.filename, str) else "/"
    while place != "/":
        try:
            found = os.stat(place)
        except OSError:
            place = os.path.dirname(place)  # what was to be made is not there; its folder is
            continue
        mode = f"mode {found.st_mode & 0o7777:04o}"
        return f" ({words}; {place} is owned by uid {found.st_uid}, group {found.st_gid}, {mode})"
    return f" ({words})"


def write_json(path: str, value: Any) -> None:
    """Write a file that is either whole or not there."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(temporary, path)


class AwakeClock:
    """Seconds that this process has been there to see; of a pause in which it was frozen no more than ``most`` count.

    A budget that is used up by such a pause (a suspended laptop, `docker pause`, a machine without a free CPU) says
    nothing about those who are watched: they may have been frozen as well, and nobody has looked meanwhile. Times that
    are given are of a monotonic clock.
    """

    def __init__(self, most: float, now: float) -> None:
        self._most, self._last, self._seen = most, now, 0.0

    def tick(self, now: float) -> float:
        """Take note of a look, and return the time of it."""
        self._seen, self._last = self.read(now), now
        return self._seen

    def read(self, now: float) -> float:
        """Return the time between two looks."""
        return self._seen + min(max(0.0, now - self._last), self._most)


# ---- torchrun's agent: a forked child of the launcher, the only one that imports torch ------------------------------

Tell = Callable[["dict[str, Any]"], None]


def agent_main(pod: Pod, flags: list[str], entry: list[str], channel: socket.socket, store_guard: int | None) -> int:
    """Run torchrun in this process and tell the launcher over ``channel`` what happens. Returns the exit code."""

    def tell(event: dict[str, Any]) -> None:
        channel.sendall(json.dumps(event).encode() + b"\n")

    def is_repeated(event: dict[str, Any]) -> bool:
        """Report failures; the launcher answers whether they repeat an earlier one."""
        tell(event)
        return bool(select.select([channel], [], [], _SECONDS_FOR_ANSWER)[0]) and channel.recv(1) == _REPEATED

    try:
        quiet = os.environ.setdefault(_CPP_LOG_LEVEL, "") == ""
        if quiet:  # a store that ends before its clients fills the log with C++ stacks, also when all is well
            os.environ[_CPP_LOG_LEVEL] = "ERROR"
        torch = importlib.import_module("torch")
        if quiet:
            del os.environ[_CPP_LOG_LEVEL]  # the workers' own logs stay as they are
        if store_guard is not None:
            tell({"store": fork_store(torch, pod.port, store_guard, channel)})
            os.close(store_guard)
        torchrun = importlib.import_module("torch.distributed.run")
        leave = adapt_torchrun(pod, tell, is_repeated)
        if channel.recv(1) != b"g":  # the launcher says when the master is there
            return 1
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    except Exception as error:
        tell({"result": "error", **describe(error)})
        return 1
    try:
        arguments = torchrun.parse_args([*flags, "--no-python", *entry])
    except SystemExit:
        tell({"result": "error", "type": "ArgumentError", "message": "torchrun refused its arguments", "traceback": ""})
        return 2
    try:
        torchrun.run(arguments)
    except errors.ChildFailedError:
        tell({"result": "failed"})  # which worker and why was told when it happened
        return 1
    except processes.SignalException as error:
        leave()
        tell({"result": "signal", "signal": int(error.sigval)})
        return 1
    except Exception as error:
        tell({"result": "error", **describe(error)})
        return 1
    tell({"result": "ok"})
    return 0


def describe(error: BaseException) -> dict[str, str]:
    """Return an exception as JSON."""
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": type(error).__name__, "message": str(error), "traceback": trace[-8192:]}


def fork_store(torch: Any, port: int, guard: int, channel: socket.socket) -> int:
    """Host the rendezvous store in a process of its own, so that it outlives the agent but not the launcher.

    Raises: OSError if the port is taken.
    """
    ready, ready_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ready_end)
        problem = os.read(ready, 4096)
        os.close(ready)
        if problem != b"ok":
            raise OSError(f"cannot serve the rendezvous on port {port}: {problem.decode(errors='replace')}")
        return pid
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        channel.close()
        try:
            store = torch.distributed.TCPStore("localhost", port, None, True, wait_for_workers=False)
        except Exception as error:
            os.write(ready_end, str(error).encode()[:4096] or b"?")
            os._exit(1)
        os.write(ready_end, b"ok")
        os.close(ready_end)
        os.read(guard, 1)  # returns when the launcher lets go or is gone
        del store
    finally:
        os._exit(0)


def adapt_torchrun(pod: Pod, tell: Tell, is_repeated: Callable[[dict[str, Any]], bool]) -> Callable[[], None]:
    """Teach the agent what torchrun has no flag for. Where torch has changed, the rest of the launcher still works.

    It tells what it does; it does not restart what a restart cannot help, nor what fails the same way again; it gives
    workers their grace time; it lets workers end by themselves for a while when the store is gone, so that their own
    exit codes say why. In an elastic job it restarts for free when other pods come and go, and knows whom to wait for.

    Returns a function that takes this pod out of the rendezvous, so that the others need not wait for its heartbeats
    to end.
    """
    server = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    rounds: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    agent, handler = server.LocalElasticAgent, rounds.DynamicRendezvousHandler

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            log(f"this torch has no {owner.__name__}.{name}: some details will not be reported")
        else:
            setattr(owner, name, lambda self, *args, **kwargs: around(inner, self, *args, **kwargs))

    gate = SignalGate(processes)
    board = StallBoard(os.path.join(pod.runtime, _STALL_REPORT), max(0.5, min(5.0, pod.nodes / 100)))
    gathering = Gathering(pod.nodes)
    meeting: list[Any] = []  # the rendezvous handler, once it is known

    def rendezvous(inner: Any, self: Any, *args: Any) -> Any:
        tell({"phase": "Rendezvous"})
        if pod.elastic and args:
            meeting[:] = [args[0].spec.rdzv_handler]
            gathering.begin(meeting[0]._state_holder.state)
        return inner(self, *args)

    def join(inner: Any, self: Any, ctx: Any, deadline: float) -> Any:
        action, actions = inner(self, ctx, deadline), rounds._Action
        if action not in (actions.SYNC, actions.KEEP_ALIVE, actions.MARK_RENDEZVOUS_COMPLETE):
            return action
        wish = gathering.decide(ctx.state, ctx.node, ctx.settings.min_nodes, time.monotonic())
        if wish is None:
            return action
        if wish:
            return actions.MARK_RENDEZVOUS_COMPLETE
        return actions.KEEP_ALIVE if rounds._should_keep_alive(ctx) else actions.SYNC

    def leave() -> None:
        for handler in meeting:
            try:
                handler._op_executor.run(rounds._RendezvousExitOp(), time.monotonic() + 5)
            except Exception as error:
                log(f"the others will notice that this pod is gone by its silence: {error}")

    def start(inner: Any, self: Any, *args: Any) -> Any:
        if pod.preflight is not None and args and is_first_round(args[0]):
            ranks = [(one.local_rank, one.global_rank, one.world_size) for one in args[0].workers]
            report = run_preflight(importlib.import_module("torch"), pod, pod.preflight, ranks)
            tell({"preflight": report})
            if report["problems"] and pod.preflight.fail:
                raise PreflightError("; ".join(f"{check}: {text}" for check, text in report["problems"].items()))
        with gate:
            started = inner(self, *args)
        tell({"phase": "Running"})
        return started

    def restart(inner: Any, self: Any, *args: Any) -> Any:
        tell({"restart": True})
        return inner(self, *args)

    def monitor(inner: Any, self: Any, *args: Any) -> Any:
        result = inner(self, *args)
        stalls = board.exchange(self, time.monotonic()) if pod.nodes > 1 or pod.elastic else None
        if stalls is not None:
            tell({"board": stalls})
        failures = [judge(pod, read_failure(rank, item)) for rank, item in (result.failures or {}).items()]
        if failures and not pod.elastic:
            ranks, pods = find_early_ends(self)
            failures = [blame_early_ends(failure, ranks, pods) for failure in failures]
            if pods:
                self._remaining_restarts = 0  # they do not come to another rendezvous: it would only time out
        stopping = os.path.exists(os.path.join(pod.runtime, _STOPPING))
        verdicts = [failure["verdict"] for failure in failures]
        blameless = all(verdict.victim or verdict.exit_code == EXIT_PREEMPTED for verdict in verdicts)
        free = bool(failures) and pod.elastic and blameless and not stopping and gathering.spend()
        repeated = bool(failures) and is_repeated({"failures": failures, "free": free})
        if free:
            self._remaining_restarts += 1
        elif repeated or any(failure["verdict"].exit_code in (EXIT_USER_ERROR, EXIT_PREEMPTED) for failure in failures):
            self._remaining_restarts = 0
        return result

    def close(inner: Any, self: Any, death_sig: Any = None, timeout: float = 30) -> Any:
        saves = os.path.exists(os.path.join(pod.runtime, _STOPPING)) or pod.elastic
        release_stopped(self.pids().values(), saves=saves)
        return inner(self, death_sig, pod.grace if saves else timeout)

    lost: list[tuple[AwakeClock, Exception]] = []

    def count_waiting(inner: Any, self: Any) -> Any:
        if not lost:
            try:
                return inner(self)
            except Exception as error:
                lost.append((AwakeClock(1.0, time.monotonic()), error))
        clock, problem = lost[0]
        if clock.tick(time.monotonic()) > _SECONDS_WITHOUT_STORE:
            raise problem
        return 0

    def wait_for_ends(inner: Any, self: Any) -> Any:
        if have_all_ended(self, _SECONDS_FOR_ENDS):
            return inner(self)
        log("rank 0 has succeeded, which is enough by spec.successPolicy: the other pods are not waited for")
        return None

    def identify(inner: Any, self: Any, local_addr: str | None = None) -> Any:
        node = inner(self, local_addr)
        # An agent that takes a dead one's place is the same node: the others need not wait for its heartbeats to end.
        return type(node)(node.addr, 0, 0) if local_addr else node

    wrap(rounds._NodeDescGenerator, "generate", identify)
    wrap(agent, "_rendezvous", rendezvous)
    wrap(agent, "_start_workers", start)
    wrap(agent, "_restart_workers", restart)
    wrap(agent, "_monitor_workers", monitor)
    wrap(processes.PContext, "close", close)
    wrap(handler, "num_nodes_waiting", count_waiting)
    if pod.success_policy == "RankZero" and pod.node == 0:
        wrap(agent, "_exit_barrier", wait_for_ends)  # torchrun would wait there for 300 s
    if pod.elastic:
        known: list[Heartbeats] = []
        wrap(rounds._RendezvousJoinOp, "__call__", join)
        wrap(rounds._BackendRendezvousStateHolder, "_sanitize", lambda inner, self: remove_the_dead(inner, self, known))
    # torchrun looks for the others once a second, whatever their number: most of a small job's rendezvous is sleep.
    pause = min(1.0, pod.nodes / 100)
    try:
        rounds._BackendRendezvousStateHolder.__init__.__defaults__ = (pause,)
        slow = rounds._delay
        rounds._delay = lambda seconds: slow(pause if seconds == 1 else (0, min(0.3, pause)))
    except AttributeError:
        pass
    return leave


def release_stopped(pids: Iterable[int], *, saves: bool) -> None:
    """Let no stopped worker hold up its agent: SIGTERM would not reach it before the whole wait for it is over.

    ``saves``: it goes on, to save as the others do. Otherwise what it has is lost anyway.
    """
    for pid in pids:
        if process_state(pid) in _STOPPED:
            try:
                os.kill(pid, signal.SIGCONT if saves else signal.SIGKILL)
            except OSError:
                pass


class SignalGate:
    """Holds back a signal to the agent while it starts the workers.

    torchrun answers a signal by an exception wherever it stands. Raised between the start of a worker and the note of
    it, that worker would be killed without its grace time: nobody knows that it is there.
    """

    def __init__(self, processes: Any) -> None:
        self._answer = getattr(processes, "_terminate_process_handler", None)
        self._closed = False
        self._held: list[int] = []
        if self._answer is not None:
            processes._terminate_process_handler = self._on_signal

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._closed:
            self._held.append(number)
        elif self._answer is not None:
            self._answer(number, frame)

    def __enter__(self) -> None:
        self._closed = True

    def __exit__(self, *about: object) -> None:
        self._closed = False
        if self._held and self._answer is not None:
            self._answer(self._held.pop(0), None)


class Gathering:
    """When an elastic job's pods have met: whom to wait for, and for how long.

    torchrun knows a least and a greatest number. In between it waits a fixed time, too short for the first start and
    too long for every other. We know better: at first the pods that were asked for, later those that were there.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._known: set[Any] = set()
        self._since: tuple[int, float] = (-1, 0.0)
        self._free = 0

    def begin(self, state: Any) -> None:
        """Note who is there before this pod leaves the round that it was in."""
        self._known = {*state.participants, *state.wait_list} if state.complete else set()

    def spend(self) -> bool:
        """Take one of the free restarts. Returns whether there was one."""
        self._free += 1
        return self._free <= _FREE_RESTARTS

    def decide(self, state: Any, node: Any, least: int, now: float) -> bool | None:
        """Return whether the round is complete now; None: as torchrun sees it. Times are of a monotonic clock."""
        if state.complete or node not in state.participants or len(state.participants) < least:
            return None
        if self._since[0] != state.round:
            self._since = (state.round, now)
        waited = now - self._since[1]
        if state.round == 0:
            return True if len(state.participants) >= self._nodes else None if waited > _FIRST_CALL_SECONDS else False
        missing = self._known - set(state.participants)
        if not self._known or (missing and waited <= _GONE_SECONDS):
            return None
        return True if all(one not in state.last_heartbeats for one in missing) else None


class Heartbeats:
    """Whose heartbeats have ended, as far as this pod has been there to see.

    torchrun goes by the time in the store: where that, or a busy machine, has held up everybody for long enough, the
    first to get on takes all others for dead and meets without them, while they train on: two groups, one checkpoint.
    So a pod counts as dead only when its last heartbeat was seen, and seen again, for as long as torchrun waits.
    """

    def __init__(self, patience: float, now: float) -> None:
        self._patience = patience
        self._clock = AwakeClock(patience / 3, now)
        self._seen: dict[Any, tuple[Any, float]] = {}

    def spare(self, beats: dict[Any, Any], now: float) -> list[Any]:
        """Take in the last heartbeat of each pod; return those that may live. ``now`` is of a monotonic clock."""
        time_ = self._clock.tick(now)
        before, self._seen = self._seen, {}
        for node, beat in beats.items():
            same = node in before and before[node][0] == beat
            self._seen[node] = before[node] if same else (beat, time_)
        return [node for node, (_, since) in self._seen.items() if time_ - since < self._patience]


def remove_the_dead(inner: Callable[[Any], None], holder: Any, known: list[Heartbeats]) -> None:
    """Let torchrun's holder of the rendezvous' state remove dead pods from it, those that may live apart."""
    if not known:
        settings = holder._settings
        patience = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
        known.append(Heartbeats(patience, time.monotonic()))
    beats = holder._state.last_heartbeats
    spared = {node: beats[node] for node in known[0].spare(beats, time.monotonic())}
    beats.update((node, beat.replace(year=9999, month=1, day=1)) for node, beat in spared.items())
    try:
        inner(holder)
    finally:
        beats.update(spared)


def ask_store(question: Callable[[], Any]) -> list[Any]:
    """Return the answer of a store as a list of one; of one that is gone, or cut off, nothing after a short while."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception:
            pass  # there is no store any more

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS_FOR_STORE)
    return answers


class StallBoard:
    """What the pods of a job know of a stall, in the store of their round: how many have seen what, and one root cause.

    The launcher leaves its own report in a file; see ``StallReport``. Without a stall the store is not asked.
    """

    _KEY = "ddp/stall/"

    def __init__(self, path: str, every: float) -> None:
        self._path, self._every = path, every
        self._last = -math.inf
        self._store: Any = None
        self._posted: dict[str, Any] = {}
        self._asking: list[bool] = []  # of a store that does not answer no second question is asked

    def exchange(self, agent: Any, now: float) -> dict[str, Any] | None:
        """Post this pod's report and return the board; None where there is nothing to post, or no answer."""
        if now - self._last < self._every:
            return None
        self._last = now
        mine, store = read_json(self._path), getattr(agent, "_store", None)
        if store is not self._store:
            self._store, self._posted, self._asking = store, {}, []
        if store is None or self._asking or not (mine or self._posted):
            return None
        asking = self._asking

        def ask() -> dict[str, Any]:
            asking.append(True)
            board = self._post(store, mine)
            asking.clear()
            return board

        answers = ask_store(ask)
        return {**answers[0], "pods": agent._worker_group.group_world_size} if answers else None

    def _post(self, store: Any, mine: dict[str, Any]) -> dict[str, Any]:
        board: dict[str, Any] = {}
        for name in ("known", "stuck", "idle"):
            before, wanted = bool(self._posted.get(name)), bool(mine.get(name))
            board[name] = int(store.add(self._KEY + name, wanted - before))
            self._posted = {**self._posted, name: wanted}
        key, own = f"{self._KEY}cause", mine.get("cause")
        found = json.loads(store.get(key)) if store.check([key]) else None
        if own != found and found in (None, self._posted.get("cause")):
            store.set(key, json.dumps(own))
            found = own
        self._posted = {**self._posted, "cause": own} if mine else {}
        return {**board, "cause": found}


def find_early_ends(agent: Any) -> tuple[list[int], int]:
    """Return the ranks of this pod that have ended well while others have not, and how many pods have as a whole.

    A pod whose ranks have all ended well waits for the others at torchrun's last barrier, which counts in the store.
    """
    waiting = ask_store(lambda: int(agent._store.add(_LAST_BARRIER, 0)))
    try:
        ended = {rank for rank, one in agent._pcontext.subprocess_handlers.items() if one.proc.poll() == 0}
        ranks = sorted(one.global_rank for one in agent._worker_group.workers if one.local_rank in ended)
    except AttributeError:  # another torch
        ranks = []
    return ranks, sum(waiting)


def have_all_ended(agent: Any, patience: float) -> bool:
    """Tell whether the ranks of all other pods have ended too, or do so within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    try:
        while agent._store.add(_LAST_BARRIER, 0) < agent._worker_group.group_world_size - 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
    except Exception:
        return False  # there is no store any more
    return True


def blame_early_ends(failure: dict[str, Any], ranks: list[int], pods: int) -> dict[str, Any]:
    """Return a failure, which is no network's where a rank lost peers that had ended by themselves."""
    if not failure["verdict"].victim or not (ranks or pods):
        return failure
    if ranks:
        left = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    else:
        left = f"{pods} other pod{'s' if pods > 1 else ''}"
    return {**failure, "left": left, "verdict": Verdict(CATEGORY_USER_ERROR, EXIT_RETRYABLE)}


def is_first_round(worker_group: Any) -> bool:
    """Tell whether all pods meet for the first time; in a later round some are past their preflight already."""
    try:
        return bool(worker_group.spec.rdzv_handler._state_holder.state.round == 0)
    except AttributeError:
        return True  # the static rendezvous has one round


def read_failure(rank: int, failure: Any) -> dict[str, Any]:
    """Return torchrun's ProcessFailure as JSON; scripts under @record have a message with a traceback in it."""
    text, trace = failure.message, ""
    if isinstance(text, dict):
        trace = str(text.get("extraInfo", {}).get("py_callstack", ""))
        text = str(text.get("message", ""))
    elif failure.error_file_data.get("message") == "<NONE>":
        text = ""  # torchrun's own advice to use @record
    about = {"rank": rank, "localRank": failure.local_rank, "exitCode": failure.exitcode, "time": failure.timestamp}
    return {**about, "type": "", "message": text, "traceback": trace}


# ---- the preflight: what the ranks will need from the network, tried before they start ------------------------------

PREFLIGHT_CHECKS = ("dns", "tcp", "allreduce")
_PROBE_SECONDS = 60.0
_PROBE_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
_PROBE_REPEATS = 3


class PreflightPlan(NamedTuple):
    """What to try, and whether a failure ends the pod. ``least`` is in bytes a second."""

    fail: bool
    checks: tuple[str, ...]
    least: float


class PreflightError(Exception):
    """A check has failed and spec.preflight.mode is Fail."""


def read_preflight(text: str) -> PreflightPlan | None:
    """Read ``mode=Warn,checks=dns+tcp,least=0``; None where there is nothing to try. Raises: ValueError."""
    if not text:
        return None
    words = dict(word.partition("=")[::2] for word in text.split(","))
    try:
        checks = tuple(check for check in PREFLIGHT_CHECKS if check in words["checks"].split("+"))
        plan = PreflightPlan(words["mode"] == "Fail", checks, float(words["least"]))
    except (KeyError, ValueError):
        raise ValueError(f"{ENV_PREFLIGHT}={text!r} is not mode=…,checks=…,least=…") from None
    return plan if checks and words["mode"] != "Off" else None


def find_partners(pod: Pod) -> list[tuple[str, int]]:
    """Return what this pod must reach: the rendezvous on pod 0, and the metrics page of the next pod by index."""
    partners = [(pod.master, pod.port)]
    if not pod.local and pod.nodes > 1:
        following = (pod.node + 1) % pod.nodes
        partners.append((re.sub(r"-0(?=\.|$)", f"-{following}", pod.master, count=1), pod.metrics_port))
    return partners


def try_dns(hosts: Iterable[str]) -> float:
    """Resolve names. Returns the longest time, seconds. Raises: OSError that names the host."""
    longest = 0.0
    for host in hosts:
        start = time.monotonic()
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"{host} does not resolve: {error.strerror or error}") from None
        longest = max(longest, time.monotonic() - start)
    return longest


def try_tcp(partners: Iterable[tuple[str, int]]) -> float:
    """Connect. Returns the longest time, seconds. Raises: OSError that names the address."""
    longest = 0.0
    for host, port in partners:
        start = time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=10):
                longest = max(longest, time.monotonic() - start)
        except OSError as error:
            raise OSError(f"no connection to {host}:{port}: {error.strerror or error}") from None
    return longest


def try_all_reduce(torch: Any, pod: Pod, ranks: Sequence[tuple[int, int, int]]) -> dict[str, float]:
    """All-reduce over all ranks, in children of this process. ``ranks``: (local rank, rank, world size) of this pod's.

    Returns seconds for a single number and bytes a second for a large tensor. Raises: OSError.
    """
    children: dict[int, int] = {}
    for one in ranks:
        result, result_end = os.pipe()
        pid = os.fork()
        if not pid:
            said: dict[str, Any] = {"problem": "the probe ended without a word"}
            try:
                die_with(os.getppid())
                os.close(result)
                said = _all_reduce(torch, pod, *one)
            except BaseException as error:
                said = {"problem": f"{type(error).__name__}: {str(error)[:500]}"}
            finally:
                os.write(result_end, json.dumps(said).encode())
                os._exit(0)
        os.close(result_end)
        children[result] = pid
    deadline = time.monotonic() + _PROBE_SECONDS + 10
    figures: list[dict[str, Any]] = []
    for result, pid in children.items():
        ready = select.select([result], [], [], max(0.0, deadline - time.monotonic()))[0]
        text = os.read(result, 4096) if ready else b'{"problem": "no answer in time"}'
        figures.append(json.loads(text or b'{"problem": "the probe was killed"}'))
        os.close(result)
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
        os.waitpid(pid, 0)
    problems = [one["problem"] for one in figures if "problem" in one]
    if problems:
        raise OSError(f"all-reduce of all ranks: {problems[0]}")
    return {key: max(one[key] for one in figures) for key in ("seconds", "rate")}


def _all_reduce(torch: Any, pod: Pod, local_rank: int, rank: int, world: int) -> dict[str, float]:
    """Measure as one rank."""
    import datetime

    dist = torch.distributed
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local_rank
    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    limit = datetime.timedelta(seconds=_PROBE_SECONDS)
    if world == pod.nproc:
        store = dist.FileStore(os.path.join(pod.runtime, "preflight"), world)
    else:
        host = "localhost" if pod.node == 0 else pod.master
        store = dist.TCPStore(host, pod.port, None, False, timeout=limit)
    dist.init_process_group(
        backend, store=dist.PrefixStore("preflight", store), rank=rank, world_size=world, timeout=limit
    )

    def measure(tensor: Any) -> float:
        start = time.monotonic()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize(device)
        return time.monotonic() - start

    number = torch.ones(1, device=device)
    large = torch.ones(_PROBE_BYTES[backend] // 4, device=device)
    measure(large)  # connections are made at the first use
    seconds = min(measure(number) for _ in range(_PROBE_REPEATS))
    fastest = min(measure(large) for _ in range(_PROBE_REPEATS))
    if not is_sum(float(large[0]), world, _PROBE_REPEATS + 1):
        raise OSError(f"a wrong sum: {float(large[0])}")
    # Each rank sends and receives this share of the data in a ring, which makes figures of all sizes comparable.
    return {"seconds": seconds, "rate": _PROBE_BYTES[backend] * 2 * (world - 1) / max(1, world) / fastest}


def is_sum(found: float, ranks: int, times: int) -> bool:
    """Tell whether a one has become what it must by being summed over all ranks so many times.

    It is rounded to 24 bits in between, by far less than a missing rank would change it.
    """
    return math.isclose(found, float(ranks) ** times, rel_tol=min(1e-3, 2 / ranks))


def run_preflight(torch: Any, pod: Pod, plan: PreflightPlan, ranks: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """Make the checks. Returns seconds by check, the all-reduce's rate, and the problems by check."""
    seconds: dict[str, float] = {}
    problems: dict[str, str] = {}
    rate: float | None = None
    partners = find_partners(pod)
    for check in plan.checks:
        if pod.nodes == 1 and check != "allreduce":
            continue  # nobody to reach
        try:
            if check == "dns":
                seconds[check] = try_dns(host for host, _ in partners)
            elif check == "tcp":
                seconds[check] = try_tcp(partners)
            elif ranks[0][2] > 1:
                figures = try_all_reduce(torch, pod, ranks)
                seconds[check], rate = figures["seconds"], figures["rate"]
                if rate < plan.least:
                    problems[check] = f"{rate / 1e6:.0f} MB/s, less than the {plan.least / 1e6:.0f} that are asked for"
        except OSError as error:
            problems[check] = str(error)
    return {"seconds": seconds, "rate": rate, "problems": problems}


# ---- why it failed --------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """A failure's category, the launcher's exit code for it, and whether another pod's failure explains it."""

    category: str
    exit_code: int
    victim: bool = False


_OOM = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED", re.I
)
_PEERS = re.compile(r"Dist(Backend|Network|Store)Error|gloo|nccl|ProcessGroup|TCPStore|c10d|rendezvous", re.I)
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|timed? ?out|remote p(eer|rocess)"
    r"|connectFullMesh|nccl(Remote|System|Internal)Error|unhandled system error|recvValue|Dist(Network|Store)Error",
    re.I,
)
# Not the device that a script's own mistake names: tensors on cuda:0 and cpu, a torch.cuda.FloatTensor, 'cuda'.
_CUDA = re.compile(r"(?<!['\"])\bCUDA\b(?![:.]?\w|['\"])|cudnn|cublas|AcceleratorError|\bNVML\b|\bHIP error", re.I)
# Faults of GPU and network come as one of these, or of torch's own types; what a script asserts of them is its own.
_FAULT = re.compile(r"(SystemExit: )?(RuntimeError|OSError|TimeoutError|(\w+\.)+\w+): ")
# The script wants a GPU in a pod without one: its backend is called nccl, but nobody's network is to blame.
_NO_GPU = re.compile(
    r"no GPUs found|NCCL built in|not compiled with CUDA|Found no NVIDIA driver|CUDA-capable device is detected"
    r"|'torch\._C' has no attribute '_cuda_|requires CUDA support|dummy base class \w*(CUDA|Event|Stream)"
    r"|accelerator device when none is available|on a CUDA device but torch\.cuda\.is_available\(\) is False"
    r"|accelerator support: None|start of device string: None",
    re.I,
)
_NO_DEVICES = re.compile(r"No CUDA GPUs are available")
# Ranks are in different collectives: TORCH_DISTRIBUTED_DEBUG=DETAIL says which, gloo notices no more than the sizes.
_MISMATCH = re.compile(r"mismatch between collectives|op\.preamble\.length <= op\.nbytes")
_CALL = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(.*?OpType=(\w+)(?:, TensorShape=(\[[^\]]*\]))?"
)
_AT_START = ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")
_OWN_WORDS = {
    EXIT_USER_ERROR: Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR),
    EXIT_RETRYABLE: Verdict(CATEGORY_UNKNOWN, EXIT_RETRYABLE),
    EXIT_HANG: Verdict(CATEGORY_HANG, EXIT_HANG),
    EXIT_OOM: Verdict(CATEGORY_OOM, EXIT_OOM),
    EXIT_PREEMPTED: Verdict(CATEGORY_PREEMPTED, EXIT_PREEMPTED),
    EXIT_PEER_LOST: Verdict(CATEGORY_NETWORK, EXIT_PEER_LOST, True),
}
_STORE_LOST = ("RendezvousConnectionError", "DistNetworkError", "DistStoreError")
_PEER_HINT = "another rank went away first, or the network did; look for the earliest failure of the other pods"
_HINTS = {
    CATEGORY_USER_ERROR: "fix the line of the script that the traceback points to",
    CATEGORY_OOM: "lower the batch size, or raise the memory limit of the trainer container",
    CATEGORY_CUDA: "look at the node's GPU (nvidia-smi, dmesg); CUDA_LAUNCH_BLOCKING=1 shows the failing call",
    CATEGORY_HANG: "the log has the stacks of all ranks; a phase that is long by nature needs a longer budget in "
    "spec.watchdog, or calls of exporter.heartbeat()",
    CATEGORY_NCCL: _PEER_HINT,
    CATEGORY_NETWORK: _PEER_HINT,
    CATEGORY_PREEMPTED: "",
}
# What a message says of the remedy better than its category does.
_ADVICE = (
    (
        re.compile(r"(CUDA|HIP)( error:)? out of memory|STATUS_ALLOC_FAILED", re.I),
        "the GPU's memory is full, which no limit of the container changes: a smaller batch, gradient accumulation, or "
        "a narrower number format",
    ),
    (
        re.compile(rf"{_NO_GPU.pattern}|{_NO_DEVICES.pattern}", re.I),
        "the pod has no GPU: ask for one in the trainer's resources.limits (nvidia.com/gpu), or train on CPUs, with "
        "the backend gloo",
    ),
    (
        re.compile(r"device_ids and output_device arguments only work"),
        "the model is on the CPU: leave device_ids out there, or move it to the GPU of LOCAL_RANK first",
    ),
    (
        re.compile("invalid device ordinal", re.I),
        "a rank wants a GPU that its pod does not have: let it take the one of LOCAL_RANK, and let procPerNode be gpu",
    ),
    (
        re.compile(r"Bus error|shared memory|\(shm\)"),
        "/dev/shm is full: raise spec.shm.sizeLimit and the memory limit, or use fewer DataLoader workers",
    ),
    (
        re.compile(r"DataLoader worker .* (killed by signal: Killed|exited unexpectedly)"),
        "a DataLoader worker was killed, mostly for memory: raise the memory limit, or use fewer or leaner workers",
    ),
    (
        re.compile("cannot serve the rendezvous on port"),
        "another process of that node has the port, as with hostNetwork: delete the job and create it again with "
        "another spec.rendezvous.port",
    ),
    (
        re.compile(r"No module named|cannot open shared object file"),
        "the Python that runs the script lacks it: install it in the image (under ddp run in the active environment), "
        "or mend the name or PYTHONPATH",
    ),
    (
        re.compile("EADDRINUSE|address already in use", re.I),
        "another process has that port: let the script use MASTER_ADDR and MASTER_PORT as they are, and no fixed port",
    ),
    (
        _MISMATCH,
        "all ranks must call the same collectives, in the same order and with tensors of the same shape: look for a "
        "call under a condition such as `if rank == 0`, and for data of unequal length; TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names the calls of two ranks that differ",
    ),
    (
        re.compile(r"PermissionError: \[Errno 13\]"),
        "let the process's user or one of its groups use that path: for a volume set "
        "template.spec.securityContext.fsGroup, for files of the image runAsUser to their owner",
    ),
)
_EXITED = re.compile(r"worker exited with code \d+$")
_LEFT = "had already ended, with exit code 0,"
_HINT_LEFT = (
    "ranks of one job step together: none may leave the loop before the others (as with data of unequal length), and "
    "all should end with dist.barrier() and dist.destroy_process_group()"
)
_SILENT = "the script ended itself: its last lines in the log say why"
_CRASHED = "it crashed in native code, a library's or a kernel's; the log has the stack of a Python script then"
_HINTS_OF_EXIT_CODES = {
    **dict.fromkeys((128 + signal.SIGSEGV, 128 + signal.SIGABRT, 128 + signal.SIGBUS, 128 + signal.SIGFPE), _CRASHED),
    128
    + signal.SIGKILL: "it was killed from outside, mostly by the kernel for memory: kubectl describe pod, and dmesg "
    "on the node",
}


def advise(verdict: Verdict, report: dict[str, Any]) -> str:
    """Return what to do about a failure; empty where nothing is."""
    if _LEFT in report["message"]:
        return _HINT_LEFT
    for pattern, words in _ADVICE:
        if pattern.search(report["message"]):
            return words
    if verdict.category == CATEGORY_UNKNOWN and report["rank"] is not None:
        return _HINTS_OF_EXIT_CODES.get(report["exitCode"], _SILENT)
    if _EXITED.match(report["message"]):
        return _SILENT
    if verdict.category == CATEGORY_USER_ERROR and not report["traceback"]:
        return ""  # the launcher's own words, which say what to do
    return _HINTS.get(verdict.category, "")


def classify(code: int, kind: str, message: str, *, oom_killed: bool, non_retryable: Iterable[int] = ()) -> Verdict:
    """Judge one worker's end. ``kind`` is the exception's type, empty when none is known."""
    if kind == CATEGORY_HANG:
        return Verdict(CATEGORY_HANG, EXIT_HANG)
    if code in _OWN_WORDS:
        return _OWN_WORDS[code]
    if code in non_retryable:
        return Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR)
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL) and oom_killed:
        return Verdict(CATEGORY_OOM, EXIT_OOM)
    text = f"{kind}: {message}"
    if kind and _OOM.search(text):
        return Verdict(CATEGORY_OOM, EXIT_OOM)
    if kind and (_NO_GPU.search(text) or (_NO_DEVICES.search(text) and not has_gpu())):
        return Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR)  # the next pod has none either
    if kind and _MISMATCH.search(text):
        return Verdict(CATEGORY_USER_ERROR, EXIT_RETRYABLE)
    if kind and _PEERS.search(text) and _FAULT.match(text):
        category = CATEGORY_NCCL if "nccl" in text.lower() else CATEGORY_NETWORK
        lost = bool(_LOST.search(text)) and "in use" not in text and "EADDRINUSE" not in text
        return Verdict(category, EXIT_PEER_LOST if lost else EXIT_RETRYABLE, lost)
    if kind and _CUDA.search(text) and _FAULT.match(text):
        return Verdict(CATEGORY_CUDA, EXIT_RETRYABLE)
    if kind in _AT_START or (kind == "SystemExit" and "No module named" in message):
        return Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR)
    if kind:
        return Verdict(CATEGORY_USER_ERROR, EXIT_RETRYABLE)
    return Verdict(CATEGORY_UNKNOWN, EXIT_RETRYABLE)


_HANDED_ON = re.compile(
    r"Caught \S+ in (?P<helper>.*?)\.?\nOriginal Traceback"
    r"|-- (?P<process>Process \d+) terminated with the following error:\nTraceback"
)


def unwrap(kind: str, message: str) -> tuple[str, str]:
    """Return type and message of what went wrong in a helper: torch hands on its whole traceback as the message."""
    found = _HANDED_ON.search(message)
    if found is None:
        return kind, message
    lines = message[found.end() :].rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    words = lines[frames[-1] + 1 :] if frames else lines[-1:]
    while words and words[0].startswith("    "):
        words.pop(0)
    kind, _, message = "\n".join(words).partition(": ")
    return kind, f"{message} (in {found['helper'] or found['process']})".lstrip()


def name_mismatch(message: str) -> str:
    """Return a message of torch about ranks in different collectives with just those; any other message as it is."""
    calls = _CALL.findall(message)
    if not _MISMATCH.search(message) or len(calls) < 2:
        return message
    named = [f"rank {rank} is in {call}" + (f" of shape {shape}" if shape else "") for rank, call, shape in calls]
    return f"mismatch between collectives: {', '.join(named)}"


def judge(pod: Pod, failure: dict[str, Any]) -> dict[str, Any]:
    """Return the failure with what the rank's own error file says, and the verdict."""
    error = read_json(os.path.join(pod.runtime, "errors", f"{failure['localRank']}.json"))
    merged = dict(failure)
    merged.update((key, error[key]) for key in ("type", "message", "traceback") if isinstance(error.get(key), str))
    if isinstance(error.get("time"), (int, float)) and math.isfinite(error["time"]):
        merged["time"] = error["time"]
    if not merged["type"] and ": " in merged["message"]:  # from @record: "ValueError: text"
        merged["type"], _, merged["message"] = merged["message"].partition(": ")
    if merged["exitCode"] == -signal.SIGTERM and error.get("type") and isinstance(error.get("exitCode"), int):
        merged["exitCode"] = error["exitCode"]  # it had failed already when the agent ended it
    if merged["type"] == "SystemExit":
        merged["message"] = ": ".join(filter(None, unwrap("", merged["message"])))
    else:
        merged["type"], merged["message"] = unwrap(merged["type"], merged["message"])
    merged["message"] = name_mismatch(merged["message"])
    code, kind, text = merged["exitCode"], merged["type"], merged["message"]
    oom_killed = count_oom_kills() > pod.oom_kills
    verdict = classify(code, kind, text, oom_killed=oom_killed, non_retryable=pod.non_retryable)
    if verdict.category == CATEGORY_HANG and pod.watchdog and pod.watchdog.action == "Fail":
        verdict = verdict._replace(exit_code=EXIT_USER_ERROR)  # which nothing follows
    if kind == CATEGORY_HANG and error.get("victim") is True:
        verdict = verdict._replace(victim=True)
    merged["verdict"] = verdict
    return merged


def hear_last_lines(pod: Pod, failure: dict[str, Any]) -> dict[str, Any]:
    """Return a failure that left no exception with the rank's last lines, and judged by the traceback in them: of a
    shell that runs Python it is all there is."""
    last = read_last_lines(pod, failure["localRank"])
    heard = {**failure, "traceback": last or failure["traceback"]}
    found = find_exceptions(last)
    if not found or failure["type"] or failure["exitCode"] != 1:
        return heard
    judged = [judge(pod, {**heard, "type": kind, "message": message}) for kind, message in found]
    return min(judged, key=lambda one: bool(one["verdict"].victim))


# Whose failures are the script's own. A CUDA error may be the node's, and a lost peer or a hang is another rank's.
_OWN_FAILURES = (CATEGORY_USER_ERROR, CATEGORY_OOM, CATEGORY_UNKNOWN)
# Signals by which a process ends itself; the others come from outside, and SIGABRT from NCCL when a peer is lost.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_TRACE_BEGINS = "Traceback (most recent call last):"
_SIGNATURE_LIMIT = 200


def build_signature(failure: dict[str, Any]) -> str:
    """Return what two failures of a script have in common when they are the same; empty for what is not its own.

    That is the exception and its innermost place in the script's own code, or the exit code where there is none.
    """
    verdict, code, kind = failure["verdict"], failure["exitCode"], failure["type"]
    if verdict.victim or verdict.category not in _OWN_FAILURES or code in _OWN_WORDS:
        return ""  # an exit code of ours is the script's own word on what shall follow
    number = -code if code < 0 else code - 128
    if not kind and number > 0:
        return signal.Signals(number).name if number in _CRASHES else ""
    name = kind.rpartition(".")[2] if kind else f"exit code {code}"
    frames = _PLACE.findall(failure["traceback"].rpartition(_TRACE_BEGINS)[2]) if kind else []
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])] or frames
    place = f" at {os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""
    return f"{name}{place}"[:_SIGNATURE_LIMIT]


class Recurrence:
    """Whether a failure repeats an earlier one of this pod without progress in between."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._farthest = 0.0

    def observe(self, signature: str, step: float | None, lasted: float) -> bool:
        """Take in a failure; ``lasted``: seconds since its workers were started. Returns whether it is a repetition.

        Progress is a step beyond the farthest one; where none is reported, workers that ran for minutes made some.
        """
        if step > self._farthest if step else lasted >= _LASTED_SECONDS:
            self._seen.clear()
        self._farthest = max(self._farthest, step or 0.0)
        repeated = signature in self._seen
        if signature:
            self._seen.add(signature)
        return repeated


def name_exit(code: int) -> str:
    """Return an exit code in words."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    if number:
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exited with code {code}"


def find_root(failures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first failure that explains the others; what the agent itself ended afterwards explains nothing."""

    def order(failure: dict[str, Any]) -> tuple[bool, bool, float]:
        ended_by_agent = failure["exitCode"] == -signal.SIGTERM and not failure.get("type")
        return ended_by_agent, failure["verdict"].victim, failure["time"]

    return min(failures, key=order)


def fit_termination_message(message: dict[str, Any], limit: int = TERMINATION_MESSAGE_LIMIT) -> bytes:
    """Return the message as JSON of at most ``limit`` bytes: the traceback loses its head, then texts their tail."""
    message = dict(message)
    for field, keep_tail in (("traceback", True), ("progress", False), ("message", False), ("hint", False)):
        while True:
            text = json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
            if len(text) <= limit:
                return text
            value = message.get(field)
            if not isinstance(value, str):
                message[field] = {} if field == "progress" else ""
                break
            if not value:
                break
            room = max(0, len(value) - max(1, (len(text) - limit) // 6))
            message[field] = value[len(value) - room :] if keep_tail else value[:room]
    return json.dumps({"version": 1, "category": message["category"]}).encode()


# ---- metrics of the pod ---------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?[ \t]+(\S+)([ \t]+-?\d+)?[ \t]*")
_HEADER = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


def merge_pages(pages: Iterable[str]) -> str:
    """Merge Prometheus pages: one HELP and TYPE a name, the first of equal series, no line that is neither."""
    families: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    seen: set[str] = set()
    for number, page in enumerate(pages):
        for line in page.splitlines():
            header = _HEADER.fullmatch(line)
            if header:
                word, name, text = header[1], header[2], header[3] or ""
                families.setdefault(name, {}).setdefault(word, text)
                continue
            sample = _SAMPLE.fullmatch(line)
            if not sample or not _is_number(sample[3]) or (number and sample[1].startswith("ddp_launcher_")):
                continue
            series = sample[1] + (sample[2] or "")
            if series in seen:
                continue
            seen.add(series)
            samples.setdefault(_family_of(sample[1], families), []).append(line)
    lines: list[str] = []
    for name, rows in samples.items():
        about = families.get(name, {})
        lines += [f"# {word} {name} {about[word]}" for word in ("HELP", "TYPE") if word in about]
        lines += rows
    return "\n".join(lines) + "\n"


def _family_of(sample: str, families: dict[str, dict[str, str]]) -> str:
    if sample in families:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample[: -len(suffix)] in families:
            return sample[: -len(suffix)]
    return sample


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_progress(page: str) -> dict[str, float]:
    """Return the gauges and counters that have no label but ``rank``, and the time spent in steps."""
    kinds = {match[2]: match[3] for match in map(_HEADER.fullmatch, page.splitlines()) if match and match[1] == "TYPE"}
    found: dict[str, float] = {}
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if not sample or not _is_number(sample[3]) or not math.isfinite(float(sample[3])):
            continue
        plain = not sample[2] or re.fullmatch(r'\{rank="[^"]*",?\}', sample[2])
        kind = kinds.get(sample[1]) or kinds.get(_family_of(sample[1], {name: {} for name in kinds}))
        shown = kind in ("gauge", "counter") or sample[1] == METRIC_STEP_SECONDS
        known = sample[1].startswith("ddp_") and len(sample[1]) < 64 and shown
        if plain and known and len(found) < _PROGRESS_LIMIT:
            found[sample[1]] = float(sample[3])
    return found


def fetch_page(port: int, path: str = "/metrics") -> str:
    """Return one rank's page, at most 1 MiB within a second. Raises: OSError or ValueError."""
    deadline = time.monotonic() + _PAGE_TIMEOUT
    with socket.socket() as connection:
        connection.settimeout(_PAGE_TIMEOUT)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        chunks: list[bytes] = []
        size = 0
        while size <= _PAGE_LIMIT:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(65536)
            if not chunk:
                break
            size += len(chunk)
            chunks.append(chunk)
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    if size > _PAGE_LIMIT or b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ValueError("no usable page")
    return body.decode("utf-8", "replace")


class Metrics:
    """The pod's one metrics endpoint: its own series and the pages of its ranks."""

    def __init__(self, runtime: str, own_page: Callable[[], str]) -> None:
        self._folder = os.path.join(runtime, "metrics")
        self._own_page = own_page
        self.last_failure = b""  # after which the workers were restarted in place, as JSON
        self._last: dict[int, str] = {}
        self._slots = threading.BoundedSemaphore(16)

    def serve(self, port: int) -> int:
        """Listen on all addresses, from now on. Returns the port taken. Raises: OSError."""
        try:
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):
            server = socket.create_server(("", port))
        threading.Thread(target=self._accept, args=(server,), daemon=True, name="metrics").start()
        return int(server.getsockname()[1])

    def _ranks(self) -> list[int]:
        """Return the local ranks that have a page."""
        try:
            names = [name.partition(".") for name in os.listdir(self._folder)]
        except OSError:
            return []
        return sorted({int(rank) for rank, _, kind in names if rank.isdigit() and kind in ("port", "prom", "log")})

    def collect(self) -> dict[int, str]:
        """Return the pages of the local ranks in order: live ones, else what a rank left behind."""
        pages: dict[int, str] = {}
        threads = [threading.Thread(target=self._collect, args=(rank, pages), daemon=True) for rank in self._ranks()]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 2 * _PAGE_TIMEOUT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = dict(pages)
        self._last.update(done)
        return {rank: done[rank] for rank in sorted(done)}

    def progress(self) -> dict[str, float]:
        """Return the last known values of the lowest rank, once all have ended: then nobody keeps us waiting."""
        for rank in self._ranks():
            self._collect(rank, self._last)
            if rank in self._last:
                break
        return read_progress(self._last[min(self._last)]) if self._last else {}

    def step(self, rank: int) -> float | None:
        """Return how far a local rank, which has ended, says that the run was; else any other of this pod."""
        for one in (rank, *(other for other in self._ranks() if other != rank)):
            self._collect(one, self._last)
            values = read_progress(self._last.get(one, ""))
            step = values.get(METRIC_GLOBAL_STEP, values.get(METRIC_STEPS))
            if step is not None:
                return step
        return None

    def threads(self, rank: int) -> str:
        """Return what the other threads of a local rank do, if it has any and an exporter that answers."""
        try:
            return self._ask(rank, "/threads")[:_STACK_LIMIT].rstrip()
        except (OSError, ValueError, OverflowError):
            return ""

    def _ask(self, rank: int, page: str) -> str:
        with open(os.path.join(self._folder, f"{rank}.port"), encoding="ascii") as file:
            return fetch_page(int(file.read(16)), page)

    def _collect(self, rank: int, pages: dict[int, str]) -> None:
        path = os.path.join(self._folder, str(rank))
        try:
            pages[rank] = self._ask(rank, "/metrics")
            return
        except (OSError, ValueError, OverflowError):
            pass
        for left in (f"{path}.prom", f"{path}.log"):
            try:
                with open(left, encoding="utf-8", errors="replace") as file:
                    pages[rank] = file.read(_PAGE_LIMIT)
                return
            except OSError:
                continue

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                time.sleep(0.1)  # no descriptor free
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(5)
                request = b""
                while b"\r\n\r\n" not in request and len(request) < 16384:
                    chunk = connection.recv(4096)
                    if not chunk:
                        return
                    request += chunk
                words = request.split(b"\r\n", 1)[0].split()
                path = words[1].split(b"?")[0] if len(words) == 3 and words[0] in (b"GET", b"HEAD") else b""
                status, body = "200 OK", b"ok\n"
                if path == b"/metrics":
                    body = merge_pages([self._own_page(), *self.collect().values()]).encode("utf-8", "replace")
                    if self.last_failure:  # after the merge, which lets no comment of a rank's page through
                        body += COMMENT_LAST_FAILURE.encode() + self.last_failure + b"\n"
                elif path != b"/healthz":
                    status, body = "404 Not Found", b"only /metrics and /healthz\n"
                head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + (b"" if words[0] == b"HEAD" else body))
        except OSError:
            pass
        finally:
            self._slots.release()


# ---- progress from the log ------------------------------------------------------------------------------------------

# The groups that a pattern may name, as in status.progress, and the series that each becomes.
LOG_GROUPS = {
    "step": "ddp_step",
    "totalSteps": "ddp_total_steps",
    "epoch": "ddp_epoch",
    "epochs": "ddp_epochs",
    "loss": "ddp_loss",
    "learningRate": "ddp_learning_rate",
    "samples": "ddp_samples_total",
    "samplesPerSecond": "ddp_global_samples_per_second",
    "valAccuracy": "ddp_validation_accuracy",
    "valLoss": "ddp_validation_loss",
}
METRIC_LAST_STEP = "ddp_last_step_timestamp_seconds"
METRIC_PROGRESS = "ddp_progress_ratio"
_LINE_LIMIT = 4096
_LONGEST_LINE = 1 << 16  # what is longer is shown in pieces
_LINE_SECONDS = 1.0
_LINES_A_CHUNK = 200  # of a script that writes faster than anyone reads, the last lines of each chunk are looked at
_MATCH_SECONDS = 0.1  # of CPU: a reader that only gets no CPU has no slow pattern
_SLOW_MATCHES = 3
_END_BYTES = 8192  # of a rank's output, kept for a failure that leaves no other word
_END_LINES = 15
_END_WIDTH = 300
# The first word of a torchrun that a shell has started: what follows is its own stack and summary, not the cause.
_TORCHRUNS_WORDS = re.compile(r'^(?!.*File ").*torch[./]distributed[./]elastic[./]', re.MULTILINE)
_RANK_IN_FRONT = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def compile_log_pattern(text: str) -> re.Pattern[str]:
    """Compile one of metrics.logPatterns. Raises: ValueError with the remedy."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression of Python ({error}); mend it or remove it") from None
    names = ", ".join(LOG_GROUPS)
    unknown = sorted(set(pattern.groupindex) - set(LOG_GROUPS))
    if unknown:
        raise ValueError(f"names the unknown group {unknown[0]}; known are {names}")
    if not pattern.groupindex:
        raise ValueError(f"names no group, so nothing would be read; write for example (?P<step>\\d+), known: {names}")
    return pattern


class _TooSlow(Exception):
    """A match took too long."""


class LogProgress:
    """What patterns find in one rank's output."""

    def __init__(self, patterns: list[re.Pattern[str]], epochs: int | None = None) -> None:
        self._patterns = patterns
        self._epochs = epochs  # where no line names them
        self._slow: dict[re.Pattern[str], int] = {}
        self._rest = b""
        self._values: dict[str, float] = {}
        self._steps = 0.0
        self._epoch: float | None = None  # of the last step
        self._first_epoch: float | None = None  # their numbers begin with 0 or 1
        self._begins_anew: bool | None = None  # the step counts from the begin of its epoch; None: not known yet

    def begin_anew(self) -> LogProgress:
        """Return the progress of the process that takes this one's place."""
        other = LogProgress(self._patterns, self._epochs)
        other._begins_anew, other._first_epoch = self._begins_anew, self._first_epoch
        return other

    def feed(self, chunk: bytes, now: float) -> bool:
        """Take in output; ``now`` is Unix time. Returns whether a value was found."""
        *lines, rest = re.split(rb"[\r\n]", self._rest + chunk)  # progress bars end their lines with \r
        self._rest = rest[:_LINE_LIMIT]  # of a line without end its head is looked at, as of any other
        found = False
        for line in lines[-_LINES_A_CHUNK:]:
            text = _COLOURS.sub("", line[:_LINE_LIMIT].decode("utf-8", "replace"))
            for pattern in list(self._patterns):
                found = self._take(self._search(pattern, text), now) or found
        return found

    def page(self, rank: int, world_size: int | None = None) -> str:
        """Return the values as a Prometheus page."""
        values = self._count_on()
        step, total = values.get("ddp_step"), values.get("ddp_total_steps")
        if step is not None and total:
            values[METRIC_PROGRESS] = min(1.0, max(0.0, step / total))
        if self._steps:
            values[METRIC_STEPS] = self._steps
        if world_size is not None:
            values[METRIC_WORLD_SIZE] = float(world_size)
        rows = []
        for name in sorted(values):
            rows.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            rows.append(f'{name}{{rank="{rank}"}} {values[name]!r}')
        return "\n".join(rows) + "\n"

    def _count_on(self) -> dict[str, float]:
        """Return the values, with steps that begin anew in each epoch as those of the run: 3/60 is no 5 % of it."""
        values = dict(self._values)
        if self._epochs is not None:
            values.setdefault("ddp_epochs", float(self._epochs))
        if self._begins_anew is None and self._epoch is not None and "ddp_epochs" not in values:
            # Whether 60/60 ends the run or an epoch is not known before the next one begins.
            values.pop("ddp_total_steps", None)
            if self._epoch > (self._first_epoch or 0.0):
                values.pop("ddp_step", None)
        if self._begins_anew and "ddp_total_steps" in values:
            each = values.pop("ddp_total_steps")
            if "ddp_epochs" in values:
                values["ddp_total_steps"] = values["ddp_epochs"] * each
            if self._epoch is not None:
                values["ddp_step"] += (self._epoch - (self._first_epoch or 0.0)) * each
            else:
                values.pop("ddp_step", None)  # of a process that has not said yet in which epoch it is
        return values

    def _search(self, pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
        """Search within a bounded CPU time; a pattern that is too slow three times is not used any more."""
        if not text:
            return None
        signal.setitimer(signal.ITIMER_VIRTUAL, _MATCH_SECONDS)
        try:
            try:
                return pattern.search(text)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except _TooSlow:
            self._slow[pattern] = self._slow.get(pattern, 0) + 1
            if self._slow[pattern] >= _SLOW_MATCHES:
                self._patterns.remove(pattern)
                log(f"metrics.logPatterns: {pattern.pattern!r} takes too long to match and is not used any more")
            return None

    def _take(self, match: re.Match[str] | None, now: float) -> bool:
        if match is None:
            return False
        found = {}
        for group, text in match.groupdict().items():
            try:
                found[LOG_GROUPS[group]] = float((text or "").replace(",", ""))
            except ValueError:
                continue
        step, before = found.get("ddp_step"), self._values.get("ddp_step")
        if step is not None and step != before and math.isfinite(step):
            # A count that begins anew, as in each epoch, is a step too.
            self._steps += step - before if before is not None and step > before else 1
            epoch = found.get("ddp_epoch", self._values.get("ddp_epoch"))
            if epoch is not None:
                if self._first_epoch is None:
                    self._first_epoch = min(1.0, epoch)
                if before is not None and self._epoch is not None and epoch > self._epoch and not self._begins_anew:
                    self._begins_anew = step < before
                self._epoch = epoch
            found[METRIC_LAST_STEP] = now
        self._values.update(found)
        if self._begins_anew is None and self._contradicts_run():
            self._begins_anew = True
        return bool(found)

    def _contradicts_run(self) -> bool:
        """Tell whether the last step can't be one of the run's total: its share of it is not that of its epoch."""
        step, total = self._values.get("ddp_step"), self._values.get("ddp_total_steps")
        epochs = self._values.get("ddp_epochs", self._epochs)
        if step is None or not total or not epochs or self._epoch is None or self._first_epoch is None:
            return False
        past, share, spare = self._epoch - self._first_epoch, step / total, 1.5 / total
        # One that was not seen to begin may count its epochs from 0.
        until = past + 1 if past <= 0 else past + 2
        return not past / epochs - spare <= share <= until / epochs + spare


class Lines:
    """One rank's output as whole lines, each with the rank in front: a pod with several ranks has one log."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0

    def feed(self, chunk: bytes, rank: int, now: float) -> bytes:
        """Take in output; return what to write. A line that has no end yet waits for it, at most a second."""
        if chunk and not self._rest:
            self._since = now
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (len(self._rest) > _LONGEST_LINE or now - self._since > _LINE_SECONDS):
            whole.append(self._rest)
            self._rest = b""
        elif whole:
            self._since = now
        front = b"[rank%d]: " % rank
        # torch marks the lines of an uncaught exception itself.
        return b"".join((line if line.startswith(front) else front + line) + b"\n" for line in whole)

    @property
    def waits(self) -> bool:
        """Whether a line has no end yet."""
        return bool(self._rest)


def read_output(pod: Pod, sources: dict[int, int], done: int, *, marked: bool = False) -> None:
    """Copy what the ranks write to this pod's log, keep a page of what the patterns find in it, and at last its end.

    ``sources`` maps local ranks to their pipes; ``marked``: each line gets its rank in front. Ends when ``done`` is
    closed and the pipes are empty.
    """

    def give_up(number: int, frame: Any) -> None:
        raise _TooSlow

    signal.signal(signal.SIGVTALRM, give_up)
    patterns: list[re.Pattern[str]] = []
    for text in pod.log_patterns:
        try:
            patterns.append(compile_log_pattern(text))
        except ValueError as error:
            log(f"metrics.logPatterns: {text!r} {error}")
    ranks = {descriptor: (rank, LogProgress(patterns, pod.epochs)) for rank, descriptor in sources.items()}
    lines = {descriptor: Lines() for descriptor in ranks} if marked else {}
    processes: dict[int, Any] = {}
    ends = dict.fromkeys(ranks, b"")
    changed: set[int] = set()
    written = 0.0
    ending = False
    while True:
        pause = 0.0 if ending else 0.05 if changed else 0.5
        ready = select.select([*ranks, *([] if ending else [done])], [], [], pause)[0]
        ending = ending or done in ready
        heard = False
        for descriptor in ready:
            if descriptor == done:
                continue
            chunk = os.read(descriptor, 65536)
            heard = heard or bool(chunk)
            rank = ranks[descriptor][0]
            about = _about_worker(pod, rank)
            if processes.setdefault(descriptor, about.get("pid")) != about.get("pid"):
                processes[descriptor] = about.get("pid")
                ranks[descriptor] = (rank, ranks[descriptor][1].begin_anew())  # counters begin anew with a process
                ends[descriptor] = b""
            ends[descriptor] = (ends[descriptor] + chunk)[-_END_BYTES:]
            shown = chunk
            if marked:
                shown = lines[descriptor].feed(chunk, _global_rank(pod, rank, about), time.monotonic())
            _write_all(1, shown)
            if patterns and ranks[descriptor][1].feed(chunk, time.time()):
                changed.add(descriptor)
        over = ending and not heard
        for descriptor, some in lines.items():
            if some.waits:
                local_rank = ranks[descriptor][0]
                rank = _global_rank(pod, local_rank, _about_worker(pod, local_rank))
                _write_all(1, some.feed(b"\n" if over else b"", rank, time.monotonic()))
        if changed and (over or not heard or time.monotonic() - written > 0.5):
            written = time.monotonic()
            for descriptor in changed:
                _write_log_page(pod, *ranks[descriptor])
            changed.clear()
        if over:
            for descriptor, end in ends.items():
                _write_end(pod, ranks[descriptor][0], end)
            return


def keep_reading(pod: Pod, sources: dict[int, int], done: int, *, marked: bool = False) -> None:
    """Do as read_output does, and after an error of ours go on without patterns and marks.

    A pipe that nobody reads would end the training.
    """
    try:
        read_output(pod, sources, done, marked=marked)
    except Exception as error:
        log(f"the log goes on without patterns and ranks, please report it: {describe(error)['traceback']}")
        read_output(pod._replace(log_patterns=()), sources, done)


def _end_path(pod: Pod, local_rank: int) -> str:
    return os.path.join(pod.runtime, "output", f"{local_rank}.end")


def _write_end(pod: Pod, local_rank: int, end: bytes) -> None:
    try:
        with open(_end_path(pod, local_rank), "wb") as file:
            file.write(end)
    except OSError:
        pass  # the log has it


def read_last_lines(pod: Pod, local_rank: int) -> str:
    """Return the last lines that a rank has written; empty where its output did not go through the reader."""
    try:
        with open(_end_path(pod, local_rank), "rb") as file:
            text = _COLOURS.sub("", file.read(_END_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    torchruns = _TORCHRUNS_WORDS.search(text)
    if torchruns:
        text = text[: torchruns.start()].strip() or text
    own = (
        f'File "{os.path.abspath(__file__)}"',
        "Extension modules: ",
    )  # of a crash: where the shim was, and what is loaded
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not any(word in line for word in own)]
    return "\n".join(line[:_END_WIDTH] for line in lines[-_END_LINES:])


def find_exceptions(lines: str) -> list[tuple[str, str]]:
    """Return type and message of the exceptions whose tracebacks a program wrote at last, one of each rank in it."""
    texts: dict[str, list[str]] = {}
    for line in lines.splitlines():
        front = _RANK_IN_FRONT.match(line)
        texts.setdefault(front[0].strip() if front else "", []).append(line[front.end() :] if front else line)
    found = []
    for words in texts.values():
        frames = [number for number, line in enumerate(words) if _PLACE.match(line)]
        after = itertools.dropwhile(lambda line: line.startswith("    "), words[frames[-1] + 1 :] if frames else [])
        said = _EXCEPTION.match(next(after, ""))
        if said:
            found.append((said[1], said[2] or ""))
    return found


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _about_worker(pod: Pod, local_rank: int) -> dict[str, Any]:
    """Return what a worker has said of itself, empty before it has."""
    return read_json(os.path.join(pod.runtime, "workers", f"{local_rank}.json"))


def _global_rank(pod: Pod, local_rank: int, about: dict[str, Any]) -> int:
    """Return the rank that a worker has, or that it would have if ranks went by the pods' order."""
    rank = about.get("rank")
    return rank if isinstance(rank, int) else pod.node * pod.nproc + local_rank


def _write_log_page(pod: Pod, local_rank: int, progress: LogProgress) -> None:
    path = os.path.join(pod.runtime, "metrics", f"{local_rank}.log")
    try:
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            about = _about_worker(pod, local_rank)
            file.write(progress.page(_global_rank(pod, local_rank, about), about.get("worldSize")))
        os.replace(f"{path}.tmp", path)
    except OSError:
        pass  # a full disk must not end the log


def divert_output(path: str) -> None:
    """Let this worker's output go through the launcher's reader, where there is one."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # nobody reads it
    os.set_blocking(pipe, True)
    sys.stdout.flush()
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)


# ---- the watchdog ---------------------------------------------------------------------------------------------------

_BEATS = re.compile(rf"^({METRIC_STEPS}|{METRIC_HEARTBEATS}|{METRIC_SAVING})(?:\{{[^\n]*\}})?[ \t]+(\S+)", re.MULTILINE)
_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in (.*)')
# Where a rank stands that waits for its peers: in torch's own calls, or on a line of its own that makes one.
_COLLECTIVE_FILES = re.compile(
    r"/torch/(distributed/|nn/parallel/distributed\.py|autograd/graph\.py|cuda/__init__\.py)"
)
_COLLECTIVE_CALLS = re.compile(
    r"\b(wait|all_\w+|broadcast\w*|barrier|reduce\w*|gather|scatter|send|recv|synchronize|backward|item|tolist|cpu)\("
)
_STACK_LIMIT = 64 * 1024
_WHAT_LIMIT = 200
_STALLED_RANKS_SHOWN = 8
_SECONDS_FOR_STACKS = 5.0
_SECONDS_FOR_CULPRIT = 15.0  # two seconds of waiting for a page and five for stacks, twice at worst
_PAUSES_KNOWN = 3  # with fewer between lines of a log, nothing is known of the next one
_LONGER_PAUSE = 4.0
_IDLE_SHARE = 0.01  # of a CPU for each worker: below it nothing is computed


_STOPPED = ("T", "t")  # states of a process: by SIGSTOP, by a debugger
_SAVES = re.compile(r"/torch/(serialization|distributed/checkpoint/)")


class Stall(NamedTuple):
    """A budget that is used up, since ``since``.

    ``certain``: heartbeats were promised and do not come. Otherwise it is judged from outside: ``known`` tells whether
    steps have shown in the log, ``idle`` which local ranks have used no CPU for the watchdog's time.
    """

    since: float
    message: str
    certain: bool = True
    known: bool = True
    idle: frozenset[int] = frozenset()


class StalledRank(NamedTuple):
    """What a rank of a stalled pod does. ``state`` is one of STALLED_STATES; the first two keep the others waiting."""

    rank: int
    local_rank: int
    state: str
    what: str

    @property
    def behind(self) -> bool:
        """Whether the other ranks wait for it."""
        return self.state in ("Stopped", "Behind")


class StallReport(NamedTuple):
    """What one pod posts for the others. ``known``: steps were made and have stopped. ``stuck``: no rank of the pod
    computes. ``idle``: none of them uses the CPU. ``cause``: a rank here that keeps the others waiting."""

    known: bool
    stuck: bool
    idle: bool
    cause: dict[str, Any] | None


def report_stall(stall: Stall, ranks: Sequence[StalledRank]) -> StallReport:
    """Return a pod's report on its own stall."""
    busy = any(one.state == "Busy" for one in ranks)
    idle = all(one.local_rank in stall.idle or one.state == "Stopped" for one in ranks)
    cause = None if busy else next((one._asdict() for one in ranks if one.behind), None)
    return StallReport(stall.known, not busy, idle, cause)


def read_board(board: dict[str, Any]) -> dict[str, Any]:
    """Return the board without a cause that is none: every rank can write into the store."""
    cause = board.get("cause")
    valid = isinstance(cause, dict) and set(cause) == set(StalledRank._fields) and cause["state"] in STALLED_STATES
    return {**board, "cause": cause if valid else None}


def agree_to_end(mine: StallReport, board: dict[str, Any], *, certain: bool) -> bool:
    """Tell whether this pod is to end its workers, by what all pods have found; ``board`` is empty where it is unknown.

    A rank that does not come ends its own pod, so that the job's failure names it. A stall that is not certain counts
    only where steps were seen by some pod, and no rank of any pod computes: else a long validation would be ended.
    """
    if certain and mine.cause:
        return True
    if not (mine.stuck and are_all_stuck(board)):
        return False
    return bool(mine.cause) or (not board.get("cause") and (certain or board["idle"] >= board["pods"]))


def are_all_stuck(board: dict[str, Any]) -> bool:
    """Tell whether no rank of any pod computes, where some pod has seen steps."""
    return bool(board.get("known")) and board["stuck"] >= board["pods"]


class _Pulse:
    """What was last heard of a rank's process."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid, self.since, self.counts = pid, now, (0.0, 0.0)
        self.begun = self.saving = False


class Watchdog:
    """Whether this pod's ranks make progress. Times are arguments, in seconds of any one clock.

    A heartbeat is a change of a rank's counters of steps and heartbeats. The ranks of one job step together, so the pod
    is stalled when none of its ranks has had one within the budget of its phase. ``known`` is false as long as no rank
    has shown such counters: then nothing can be said.
    """

    def __init__(self, plan: WatchdogPlan) -> None:
        self.known = False
        self._plan = plan
        self._ranks: dict[int, _Pulse] = {}

    def observe(self, pids: dict[int, int], pages: dict[int, str], now: float) -> None:
        """Take in which local ranks run (their process ids) and what their pages say."""
        for rank in set(self._ranks) - set(pids):
            del self._ranks[rank]
        for rank, pid in pids.items():
            pulse = self._ranks.get(rank)
            if pulse is None or pulse.pid != pid:
                pulse = self._ranks[rank] = _Pulse(pid, now)
            found = {name: float(text) for name, text in _BEATS.findall(pages.get(rank, "")) if _is_number(text)}
            if not found:
                continue
            self.known = True
            counts = (found.get(METRIC_STEPS, 0.0), found.get(METRIC_HEARTBEATS, 0.0))
            saving = found.get(METRIC_SAVING, 0.0) > 0
            if counts != pulse.counts or saving != pulse.saving:
                pulse.since, pulse.counts, pulse.saving = now, counts, saving
                pulse.begun = pulse.begun or any(counts)

    def age(self, now: float) -> float | None:
        """Return the time since the last heartbeat of any rank, or since the workers' start; None where none runs."""
        return now - max(pulse.since for pulse in self._ranks.values()) if self._ranks and self.known else None

    def find_stall(self, now: float) -> Stall | None:
        """Return the stall, if there is one now."""
        age, pulses = self.age(now), self._ranks.values()
        if age is None:
            return None
        if not any(pulse.begun for pulse in pulses):
            what, field, budget = "no step since the start", "startSeconds", self._plan.start
        elif any(pulse.saving for pulse in pulses):
            what, field, budget = "the checkpoint is not done", "checkpointSeconds", self._plan.checkpoint
        else:
            what, field, budget = "no step", "stallSeconds", self._plan.stall
        if age < budget:
            return None
        return Stall(now - age, f"{what} for {age:.0f} s (spec.watchdog.{field} is {budget:g})")


def bear_stall(nodes: int, look: float, *, blames: bool) -> float:
    """Return how many seconds a stall is borne after it was found; ``look``: seconds between two looks.

    The other pods shall see it too, and show their stacks, before this one's end ends the wait there. Where all ranks
    of this pod wait for another pod's, that one has more to say and goes first, however small the budget is: it needs
    its next look, which a rank that does not answer holds up, the stacks, and the two looks for which it bears it.
    """
    if nodes == 1:
        return 0.0
    return 2 * look + (0.0 if blames else 3 * look + _SECONDS_FOR_CULPRIT)


class LogPulse:
    """When a step last showed in the log of a script that reports none itself.

    Nobody promised a line every so many seconds, so a silence only counts where it is both longer than the watchdog's
    time and much longer than any before it; and even then nothing is done but to tell.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._since: float | None = None
        self._looked: float | None = None
        self._pauses = 0.0
        self._longest = 0.0

    def observe(self, steps: dict[int, float], now: float) -> None:
        """Take in how many steps each rank's log has shown so far; none where no worker runs."""
        if not steps:
            self._since = None
        elif steps != self._steps:
            made = sum(steps.values()) - sum(self._steps.values())
            if self._since is not None:
                self._pauses, self._longest = self._pauses + max(1.0, made), max(self._longest, now - self._since)
            elif self._looked is not None and made > 1:  # all of them since the last look
                self._pauses, self._longest = self._pauses + made - 1, max(self._longest, now - self._looked)
            self._since = now
        self._steps, self._looked = steps, now

    def age(self, now: float) -> float:
        """Return the time since a step has shown; infinite where none has."""
        return math.inf if self._since is None else now - self._since

    def silence(self, stall: float, now: float) -> float | None:
        """Return for how long no step has shown, where that is too long; ``stall`` is the watchdog's time."""
        if self._since is None or self._pauses < _PAUSES_KNOWN:
            return None
        age = now - self._since
        return age if age >= max(stall, _LONGER_PAUSE * self._longest) else None


class Idleness:
    """How long each worker has used next to no CPU: all there is to see of a script that reports nothing."""

    def __init__(self) -> None:
        self._workers: dict[int, tuple[float, float, float]] = {}  # since, time of the last look, CPU seconds then

    def observe(self, cpu: dict[int, float], now: float) -> dict[int, float]:
        """Take in the CPU seconds of each worker so far. Returns for how long each has been idle."""
        for rank in set(self._workers) - set(cpu):
            del self._workers[rank]
        for rank, seconds in cpu.items():
            since, last, before = self._workers.get(rank, (now, now, seconds))
            busy = abs(seconds - before) > _IDLE_SHARE * (now - last)
            self._workers[rank] = (now if busy else since, now, seconds)
        return {rank: now - since for rank, (since, _, _) in self._workers.items()}


class Stack(NamedTuple):
    """A worker's main thread: frames as (file, line, function), the outermost first, without the launcher's own."""

    frames: list[tuple[str, int, str]]
    text: str

    @property
    def waits_for_peers(self) -> bool:
        """Whether its innermost frame is in a collective operation, as far as Python can tell."""
        if not self.frames:
            return False
        path, line, _ = self.frames[-1]
        import linecache

        return bool(_COLLECTIVE_FILES.search(path) or _COLLECTIVE_CALLS.search(linecache.getline(path, line)))

    @property
    def place(self) -> str:
        """The innermost frame of the script in words, and where in a library that has led."""
        if not self.frames:
            return "an unknown place"
        own = [frame for frame in self.frames if not _LIBRARY.search(frame[0])]
        shown = [*own[-1:], *(self.frames[-1:] if own[-1:] != self.frames[-1:] else [])]
        return ", in ".join(f"{function} ({os.path.basename(path)}:{line})" for path, line, function in shown)

    @property
    def saves(self) -> bool:
        """Whether it writes a checkpoint by torch's own means."""
        return any(_SAVES.search(path) for path, _, _ in self.frames)


def read_stack(text: str) -> Stack:
    """Read what faulthandler wrote about the main thread; of another, that took the signal instead, nothing is said."""
    frames = [(path, int(line), function) for path, line, function in _FRAME.findall(text)] if _is_whole(text) else []
    frames = [frame for frame in reversed(frames) if os.path.basename(frame[0]) != os.path.basename(__file__)]
    while frames and (frames[0][0].startswith("<frozen ") or os.path.basename(frames[0][0]) == "runpy.py"):
        del frames[0]
    lines = [f'  File "{path}", line {line}, in {function}' for path, line, function in frames]
    return Stack(frames, "\n".join(["Stack (most recent call last):", *lines]) if lines else "")


def _is_whole(text: str) -> bool:
    """Tell whether the main thread's stack is there to its end: faulthandler writes the innermost hundred frames."""
    return " in worker_main\n" in text or "\n  ...\n" in text


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(offset)
            return file.read(_STACK_LIMIT)
    except OSError:
        return ""


def catches(pid: int, number: int) -> bool:
    """Tell whether a process handles a signal. One that does not, as after an exec, would be ended by most of them.

    Source: SigCgt in proc(5). True where there is no /proc to ask.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError, StopIteration):
        return not os.path.exists("/proc/self/status")


def process_state(pid: int) -> str:
    """Return the letter of a process's state, ``T`` for a stopped one; empty where it is gone or already a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        if os.path.isdir("/proc/self"):
            return ""
        try:
            os.kill(pid, 0)
        except OSError:
            return ""
        return "?"
    return "" if state in "ZX" else state


def find_family(pid: int) -> list[int]:
    """Return a process and its descendants (Linux), parents first."""
    family = [pid]
    for parent in family:
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                    family += [int(child) for child in file.read().split() if int(child) not in family]
            except (OSError, ValueError):
                continue
    return family


def count_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of processes and their descendants (Linux)."""
    ticks = 0
    for pid in {member for worker in pids for member in find_family(worker)}:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        except (OSError, IndexError, ValueError):
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


# ---- waiting for pod 0 ----------------------------------------------------------------------------------------------


_UNRESOLVED = "name does not resolve yet"
_REFUSED = "nothing listens there yet"


def wait_for_master(host: str, port: int | None, timeout: float) -> str | None:
    """Return None once ``host`` resolves and, given a port, answers; else the last problem. Logs while it waits."""
    start = time.monotonic()
    pause, next_word, spoken = 0.01, 3.0, False
    target = host if port is None else f"{host}:{port}"
    while True:
        problem = _probe(host, port)
        waited = time.monotonic() - start
        if problem is None:
            if spoken:
                log(f"{target} is there after {waited:.1f} s")
            return None
        if waited >= timeout:
            return problem
        if waited >= next_word:
            log(f"waiting for master {target} ({problem}); {timeout - waited:.0f} s left")
            next_word, spoken = waited + max(5.0, min(60.0, waited)), True
        time.sleep(pause)
        pause = min(pause * 1.2, 0.25)


def describe_absence(pod: Pod, problem: str) -> str:
    """Return in words that pod 0 was not found, and what to check for this problem."""
    master, after = f"{pod.master}:{pod.port}", f"{pod.join_timeout:g} s"
    if problem == _UNRESOLVED:
        return (
            f"DNS has not resolved the name of pod 0, {pod.master}, within {after}. Check the cluster's DNS "
            "(kubectl -n kube-system get pods -l k8s-app=kube-dns), dnsPolicy and dnsConfig in spec.template, that the "
            "job's headless Service is there, and that no NetworkPolicy keeps the pods from DNS"
        )
    if problem == _REFUSED:
        return f"pod 0 has not served the rendezvous at {master} within {after}: {problem}. Its log says what it does"
    return (
        f"pod 0 was not reached at {master} within {after}: {problem}. Check that it runs, and that no NetworkPolicy, "
        "firewall or service mesh closes the port"
    )


def _probe(host: str, port: int | None) -> str | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return _UNRESOLVED
    if port is None:
        return None
    problem = ""
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(2)
            try:
                connection.connect(address)
            except OSError as error:
                refused = error.errno == errno.ECONNREFUSED
                problem = _REFUSED if refused else f"no connection: {error.strerror or error}"
            else:
                return None
    return problem


def count_connections(port: int) -> int:
    """Return how many established TCP connections this machine has at a local port (Linux)."""
    count = 0
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path, encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        count += sum(row[3] == "01" and row[1].endswith(f":{port:04X}") for row in rows)
    return count


# ---- the launcher ---------------------------------------------------------------------------------------------------


class Launcher:
    """One pod's life: start the agent, watch it, pass signals on, and say how it ended."""

    def __init__(self, pod: Pod, flags: list[str], entry: list[str]) -> None:
        self.pod = pod
        self._flags = flags
        self._entry = entry
        self._phase = LAUNCHER_PHASES[0]
        self._restarts = 0
        self._spent = 0  # restarts that count against the budget: those after failures
        self._agent = 0
        self._agent_status: int | None = None
        self._budget = next((int(flag[15:]) for flag in flags if flag.startswith("--max-restarts=")), 0)
        self._store = 0
        self._store_guard: int | None = None
        self._reader = 0
        self._reader_guard: int | None = None
        self._channel: socket.socket | None = None
        self._unread = b""
        self._result: dict[str, Any] = {}
        self._failures: list[dict[str, Any]] = []
        self._free = False  # whether the restart after them does not count
        self._final: list[dict[str, Any]] = []  # failures that had decided the pod's end before it was asked to stop
        self._cause = ""  # of the last restart
        self._recurrence = Recurrence()
        self._began = time.monotonic()  # when the workers were last started
        self._failed_step: float | None = None  # how far the run was at the last failure of workers
        self._repeated = False  # whether that failure repeats an earlier one
        self._preflight: dict[str, Any] = {}
        self._master: list[tuple[int, str | None]] = []  # for which agent the wait is over, and the problem
        self._signals = _SIGNALS
        self._stop_deadline: float | None = None
        self._alone_since: float | None = None  # since when the stopping agent has had no worker
        self._hangs = 0
        self._stall: Stall | None = None  # the one that is under way, as it was found
        self._stalled: list[tuple[dict[str, Any], StalledRank]] = []  # its workers, and what they do
        self._board: dict[str, Any] = {}  # what all pods know of it
        self._gives_way_to: dict[str, Any] = {}  # a root cause in another pod, which ends its own workers first
        self._has_ended = False
        self._has_news = False  # whether some pod has seen steps, so that what the ranks do now counts
        self._end_hung_at = self._give_up_at = math.inf
        dog = pod.watchdog
        self._look_every = 5.0 if dog is None else max(0.1, min(5.0, dog.start / 4, dog.stall / 4))
        # Between two looks are a pause and the wait for pages that do not come.
        self._clock = AwakeClock(self._look_every + 2 * _PAGE_TIMEOUT, time.monotonic())
        self._idleness = Idleness()
        self._log_pulse = LogPulse()
        self._watchdog = Watchdog(pod.watchdog) if pod.watchdog else None
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_end, False)
        self.metrics = Metrics(pod.runtime, self._own_page)
        self._lifeline = int(os.environ.pop(ENV_LIFELINE_FD, None) or -1)

    # -- running

    def run(self) -> int:
        """Run the pod to its end. Returns the exit code."""
        prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come here and can be ended
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, lambda received, frame: self._signals.append(received))
        signal.signal(signal.SIGCHLD, lambda received, frame: None)
        os.write(self._wake_end, b"\0")  # a signal may have come before
        if self.pod.log_patterns or self._marks_lines or (self.pod.program and not self._output_is_taken):
            self._start_reader()
        self._start_agent()
        self._serve_metrics()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        while True:
            self._let_agent_go()
            while self._agent_status is None:
                self._step()
            self._read_channel()
            if not self._may_return():
                break
            self._start_agent()
        self._linger()
        self._end_processes(keep={self._reader})
        self._end_reader()
        self._enter("Done")
        return self._conclude()

    @property
    def _meets_others(self) -> bool:
        return self.pod.nodes > 1 or self.pod.elastic

    @property
    def _marks_lines(self) -> bool:
        """Whether the lines of the pod's log get their rank in front; torchrun's own ways to do so win."""
        return self.pod.nproc > 1 and not self._output_is_taken and os.environ.get(_LOG_PREFIX) != "0"

    @property
    def _output_is_taken(self) -> bool:
        return any(flag.startswith(_OUTPUT_FLAGS) for flag in self._flags)

    @property
    def _static(self) -> bool:
        return "--rdzv-backend=static" in self._flags

    def _may_return(self) -> bool:
        """Decide whether a new agent may take the old one's place: the agent was killed, or the store went away."""
        lost = self._result.get("type") in _STORE_LOST
        killed = not self._result and (self._agent_status or 0) < 0
        if self._static or self._stop_deadline is not None or not (lost or killed):
            return False
        under_way = self._phase == "Rendezvous" and self._restarts > 0  # this restart is counted already
        if not under_way:
            if self._spent >= self._budget:
                return False
            self._spent += 1
            self._restarts += 1
        import warnings

        # Forking beside threads is safe here: ours hold no lock that the agent needs.
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        self._cause = self._judge_agent()[1]
        log(f"starting torchrun's agent again, restart {self._restarts}: {self._cause}")
        self._end_processes(keep={self._store, self._reader})
        self._agent_status, self._result, self._failures, self._unread = None, {}, [], b""
        self._repeated, self._failed_step = False, None
        return True

    def _start_agent(self) -> None:
        guard: int | None = None
        if self._meets_others and self.pod.node == 0 and not self._static and not self._store:
            guard, self._store_guard = os.pipe()
        flags = [*self._flags, f"--max-restarts={self._budget - self._spent}"]
        if self._channel is not None:
            self._channel.close()
        self._channel, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        # A signal to the agent that came before it has put off our handlers would be lost.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        self._agent = os.fork()
        if self._agent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            if guard is not None:
                os.close(guard)
            self._channel.setblocking(False)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*range(1, 16), signal.SIGUSR1, signal.SIGCHLD):
                if number not in (signal.SIGKILL, signal.SIGSEGV, signal.SIGFPE, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.setsid()
            die_with(launcher)
            for descriptor in (self._wake, self._wake_end, self._store_guard, self._reader_guard, self._lifeline):
                if descriptor is not None and descriptor >= 0:
                    os.close(descriptor)
            self._channel.close()
            os.environ[_AGENT_PID] = str(os.getpid())
            code = agent_main(self.pod, flags, self._entry, theirs, guard)
        except BaseException as error:
            log(describe(error)["traceback"])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _start_reader(self) -> None:
        """Start the process through which the ranks' output goes, so that no pattern can hold up the launcher."""
        sources: dict[int, int] = {}
        for rank in range(self.pod.nproc):
            path = self._runtime("output", str(rank))
            os.mkfifo(path, 0o600)
            sources[rank] = os.open(path, os.O_RDWR)  # never at its end, whoever closes it
        done, self._reader_guard = os.pipe()
        launcher = os.getpid()
        self._reader = os.fork()
        if not self._reader:
            try:
                signal.set_wakeup_fd(-1)
                for number in (*_STOP_SIGNALS, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_IGN)
                os.close(self._reader_guard)
                die_with(launcher)
                keep_reading(self.pod, sources, done, marked=self._marks_lines)
            except BaseException as error:
                log(describe(error)["traceback"])
            finally:
                os._exit(0)
        for descriptor in (*sources.values(), done):
            os.close(descriptor)

    def _end_reader(self) -> None:
        """Let the reader pass on what is still in its pipes."""
        if self._reader_guard is None:
            return
        os.close(self._reader_guard)
        self._reader_guard = None
        deadline = time.monotonic() + _SECONDS_TO_READ
        while self._reader and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)

    def _runtime(self, *names: str) -> str:
        return os.path.join(self.pod.runtime, *names)

    def _serve_metrics(self) -> None:
        path, wanted = os.environ.get(ENV_PORT_FILE), self.pod.metrics_port
        try:
            try:
                port = self.metrics.serve(wanted)
            except OSError as error:
                if not path or not wanted:
                    raise
                # Who reads the file learns of another one; the port of an ended pod is anybody's on a shared machine.
                port = self.metrics.serve(0)
                log(f"metrics are on port {port}: cannot listen on {wanted}: {error.strerror}")
        except OSError as error:
            log(f"no metrics: cannot listen on port {wanted}: {error.strerror}")
            return
        if path:
            try:
                write_json(path, port)
            except OSError as error:
                log(f"cannot write {path}: {error.strerror}")

    def _let_agent_go(self) -> None:
        """Let the agent meet the others as soon as the master is there; until then it imports torch."""
        if self._meets_others:
            self._enter("WaitingForMaster")
            threading.Thread(target=self._wait_for_master, args=(self._agent,), daemon=True, name="master").start()
        else:
            self._go()

    def _wait_for_master(self, agent: int) -> None:
        port = None if self.pod.node == 0 else self.pod.port
        self._master.append((agent, wait_for_master(self.pod.master, port, self.pod.join_timeout)))
        os.write(self._wake_end, b"\0")

    def _go(self) -> None:
        try:
            if self._channel is not None:
                self._channel.sendall(b"g")
        except OSError:
            pass  # the agent has ended already, and said why

    # -- watching

    def _step(self) -> None:
        watched: list[Any] = [self._wake]
        if self._channel is not None:
            watched.append(self._channel)
        if self._lifeline >= 0:
            watched.append(self._lifeline)
        timeout = None if self._stop_deadline is None else max(0.0, min(0.2, self._stop_deadline - time.monotonic()))
        ready = select.select(watched, [], [], timeout)[0]
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._channel in ready:
            self._read_channel()
        if self._lifeline in ready and not os.read(self._lifeline, 1):
            self._kill(self._agent, signal.SIGKILL)
            os._exit(137)
        while self._signals:
            self._obey(self._signals.pop(0))
        while self._master:
            agent, problem = self._master.pop()
            if agent != self._agent:
                continue
            if problem is None:
                self._go()
            else:
                self._result = {"result": "error", "type": "MasterNotFound", "message": problem, "traceback": ""}
                self._kill(self._agent, signal.SIGKILL)
        if self._stop_deadline is not None and time.monotonic() >= self._stop_deadline:
            log("grace time is over: killing the workers")
            self._stop_deadline = math.inf
            self._kill(self._agent, signal.SIGKILL)
        elif self._stop_deadline is not None and self._is_alone():
            self._kill(self._agent, signal.SIGKILL)  # it waits for the other pods, deaf to signals
        self._reap()

    def _is_alone(self) -> bool:
        """Tell whether the agent has had no living worker for a while."""
        now = time.monotonic()
        if any(process_state(pid) for pid in find_family(self._agent)[1:] if pid != self._store):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        limit = _SECONDS_TO_LEAVE if self.pod.elastic else _SECONDS_WITHOUT_WORKERS
        return self._alone_since is not None and now - self._alone_since > limit

    def _obey(self, number: int) -> None:
        if number == signal.SIGUSR1:
            threading.Thread(target=self._show_stacks, args=(self._workers(),), daemon=True).start()
            return
        if self._stop_deadline is not None:
            if number == signal.SIGINT:
                self._stop_deadline = time.monotonic()
            return
        self._final = self._read_final_errors()
        log(f"{signal.Signals(number).name}: stopping; the workers have {self.pod.grace:g} s to save and exit")
        self._enter("Stopping")
        try:
            with open(os.path.join(self.pod.runtime, _STOPPING), "w", encoding="ascii"):
                pass
        except OSError as error:  # a full disk must not cost the workers their grace time
            log(f"cannot write {os.path.join(self.pod.runtime, _STOPPING)}: {error.strerror}")
        self._stop_deadline = time.monotonic() + self.pod.grace + _SECONDS_AFTER_GRACE
        self._kill(self._agent, signal.SIGTERM)

    def _kill(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except OSError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._agent:
                self._agent_status = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            if pid == self._store:
                self._store = 0
            if pid == self._reader:
                self._reader = 0

    def _read_channel(self) -> None:
        while self._channel is not None:
            try:
                data = self._channel.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._channel.close()
                self._channel = None
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, event: dict[str, Any]) -> None:
        if "phase" in event:
            self._enter(event["phase"])
        if "preflight" in event:
            self._preflight = event["preflight"]
            log(describe_preflight(self._preflight))
        if "store" in event:
            self._store = event["store"]
        if "board" in event:
            self._board = read_board(event["board"])
        if "failures" in event:
            self._free = bool(event.get("free"))
            self._failures = [{**one, "verdict": Verdict(*one["verdict"])} for one in event["failures"]]
            self._answer_failures(find_root(self._failures))
        if event.get("restart"):
            self._restarts += 1
            self._spent += bool(self._failures) and not self._free
            behind = [one.what for _, one in self._stalled if one.behind]
            hang = behind[0] if behind else self._gives_way_to.get("what")
            self._cause = describe_root(find_root(self._failures)) if self._failures else hang or _PEERS_MOVE
            log(f"restarting the workers in place, restart {self._restarts}: {self._cause}")
            if self._failures:
                root = find_root(self._failures)
                report = self._report_worker(root, {})
                self.metrics.last_failure = fit_termination_message(build_message(root["verdict"], report))
            self._failures, self._repeated, self._failed_step = [], False, None
        if "result" in event and not self._result:
            self._result = event

    def _answer_failures(self, root: dict[str, Any]) -> None:
        """Tell the agent whether the failure of its workers repeats an earlier one."""
        if self.pod.log_patterns:
            time.sleep(_SECONDS_TO_SETTLE)  # what a rank wrote last is still on its way to its page
        step = self._failed_step = self.metrics.step(root["localRank"])
        lasted = time.monotonic() - self._began
        self._repeated = self._recurrence.observe(build_signature(root), step, lasted)
        try:
            if self._channel is not None:
                self._channel.sendall(_REPEATED if self._repeated else _NEW)
        except OSError:
            pass  # the agent has ended meanwhile

    def _enter(self, phase: str) -> None:
        if phase == "Running":
            self._began = time.monotonic()
        if self._stop_deadline is None or phase == "Done":
            self._phase = phase

    def _workers(self) -> list[dict[str, Any]]:
        folder = os.path.join(self.pod.runtime, "workers")
        found = [read_json(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".json")]
        numbers = ("pid", "rank", "localRank", "restart")
        return [worker for worker in found if all(isinstance(worker.get(key), int) for key in numbers)]

    def _own_page(self) -> str:
        rows = [f"# HELP {METRIC_LAUNCHER_PHASE} What this pod's launcher is doing; one of its series is 1."]
        rows.append(f"# TYPE {METRIC_LAUNCHER_PHASE} gauge")
        rows += [f'{METRIC_LAUNCHER_PHASE}{{phase="{name}"}} {int(name == self._phase)}' for name in LAUNCHER_PHASES]
        rows.append(f"# HELP {METRIC_LAUNCHER_RESTARTS} How often torchrun restarted this pod's workers in place.")
        rows += [f"# TYPE {METRIC_LAUNCHER_RESTARTS} counter", f"{METRIC_LAUNCHER_RESTARTS} {self._restarts}"]
        rows.append(f"# HELP {METRIC_HANGS} How often the watchdog found that no rank of this pod makes progress.")
        rows += [f"# TYPE {METRIC_HANGS} counter", f"{METRIC_HANGS} {self._hangs}"]
        rows += build_preflight_rows(self._preflight)
        age = self._watchdog.age(self._clock.read(time.monotonic())) if self._watchdog else None
        stall = self._stall
        if age is None and stall is not None and stall.known:
            age = self._clock.read(time.monotonic()) - stall.since
        if stall is not None:
            ranks = [one for _, one in self._stalled]
            ranks += [StalledRank(**self._gives_way_to)] if self._gives_way_to else []
            rows += build_stall_rows(stall, ranks, self._clock.read(time.monotonic()))
        if age is not None:
            rows.append(f"# HELP {METRIC_HEARTBEAT_AGE} Time since a rank of this pod last made progress.")
            rows += [f"# TYPE {METRIC_HEARTBEAT_AGE} gauge", f"{METRIC_HEARTBEAT_AGE} {age:.3f}"]
        return "\n".join(rows)

    # -- the watchdog

    def _watch(self) -> None:
        """Keep the ranks' last pages fresh, and act on a stall. Runs in a thread of its own."""
        plan = self.pod.watchdog
        while True:
            time.sleep(self._look_every)
            pages = self.metrics.collect()
            now = self._clock.tick(time.monotonic())
            if plan is not None and self._watchdog is not None and self._stop_deadline is None:
                self._look(plan, self._watchdog, pages, now)
                self._clock.tick(time.monotonic())

    def _look(self, plan: WatchdogPlan, watchdog: Watchdog, pages: dict[int, str], now: float) -> None:
        """Look once: say what stalls, and end it when it is time to."""
        workers = [one for one in self._workers() if process_state(one["pid"]) and not self._has_closed(one)]
        beating = {
            rank: page for rank, page in pages.items() if os.path.exists(self._runtime("metrics", f"{rank}.port"))
        }
        watchdog.observe({one["localRank"]: one["pid"] for one in workers}, beating, now)
        counts = {rank: _BEATS.search(page) for rank, page in pages.items() if workers and not watchdog.known}
        steps = {rank: float(one[2]) for rank, one in counts.items() if one and _is_number(one[2])}
        self._log_pulse.observe(steps, now)
        stopped = {one["localRank"] for one in workers if process_state(one["pid"]) in _STOPPED}
        # A rank that reports its steps is only watched this way where it is stopped: nothing else of it is odd.
        watched = [one for one in workers if one["localRank"] in stopped or not watchdog.known]
        idle = self._idleness.observe({one["localRank"]: count_cpu_seconds([one["pid"]]) for one in watched}, now)
        stall = self._find_stall(plan, watchdog, workers, idle, now)
        if stall is None:
            self._end_stall()
            return
        if self._stall is None or stall[2:] != self._stall[2:]:
            self._has_news = stall.known or bool(stopped & stall.idle)
            self._begin_stall(stall, workers, now)
        elif self._board.get("known") and not self._has_news:
            self._has_news = True
            self._begin_stall(stall, workers, now)  # what idle ranks did before the job had stalled says nothing
        self._stall = stall
        if not self._is_to_end(stall, now) or plan.action == "Report" or self._has_ended:
            return
        if stall.certain or self._is_as_it_was(stall, workers):
            self._end_hung(stall)
        else:
            self._begin_stall(stall, workers, now)

    def _find_stall(
        self,
        plan: WatchdogPlan,
        watchdog: Watchdog,
        workers: list[dict[str, Any]],
        idle: dict[int, float],
        now: float,
    ) -> Stall | None:
        """Return the stall, if there is one now: heartbeats or a log that have stopped, or workers that do nothing."""
        found = watchdog.find_stall(now)
        if found is not None:
            return found
        silence = None if watchdog.known else self._log_pulse.silence(plan.stall, now)
        # Steps may need less CPU than counts as any, so a pod whose log shows them is not idle.
        quiet = math.inf if watchdog.known else self._log_pulse.age(now)
        still = {rank: seconds for rank, seconds in idle.items() if min(seconds, quiet) >= max(plan.stall, 1.0)}
        if silence is not None:
            text = f"the log has shown no step for {silence:.0f} s, longer than ever before"
            return Stall(now - silence, text, False, True, frozenset(still))
        if not still:
            return None
        ranks = [str(one["rank"]) for one in workers if one["localRank"] in still]
        who = "the workers have" if len(ranks) == len(workers) else f"rank {', '.join(ranks)} has"
        seconds = min(still.values())
        return Stall(now - seconds, f"{who} used no CPU for {seconds:.0f} s", False, False, frozenset(still))

    def _begin_stall(self, stall: Stall, workers: list[dict[str, Any]], now: float) -> None:
        """Write the stacks to the log, and let the operator and the other pods know what the ranks do."""
        self._hangs += stall.certain
        known = "" if stall.known else "; that alone ends nothing, as no step is known to be overdue"
        log(f"{'hang' if stall.known else 'idle'}: {stall.message}{known}; the stacks of this pod's ranks follow")
        self._stalled = self._examine(stall, workers, self._show_stacks(workers))
        ranks = [one for _, one in self._stalled]
        log("\n".join(one.what for one in ranks))
        self._board, self._gives_way_to, self._has_ended = {}, {}, False
        self._end_hung_at, self._give_up_at = math.inf, now + bear_stall(self.pod.nodes, self._look_every, blames=False)
        report = report_stall(stall, ranks) if self._has_news else StallReport(False, False, False, None)
        try:
            write_json(self._runtime(_STALL_REPORT), report._asdict())
        except OSError as error:
            log(f"cannot write {self._runtime(_STALL_REPORT)}: {error.strerror}")

    def _is_as_it_was(self, stall: Stall, workers: list[dict[str, Any]]) -> bool:
        """Tell whether the ranks still stand where they stood when the stall was found."""
        found = self._examine(stall, workers, self._show_stacks(workers, quiet=True))
        return [one for _, one in found] == [one for _, one in self._stalled]

    def _end_stall(self) -> None:
        """Take back what was said of a stall that is over."""
        if self._stall is not None:
            self._stall, self._stalled, self._board, self._gives_way_to = None, [], {}, {}
            try:
                os.unlink(self._runtime(_STALL_REPORT))
            except OSError:
                pass

    def _is_to_end(self, stall: Stall, now: float) -> bool:
        """Tell whether this pod's workers are to be ended now, by what all pods have found."""
        report = report_stall(stall, [one for _, one in self._stalled])
        board = self._board
        if not self._meets_others:
            board = {"known": int(report.known), "stuck": int(report.stuck), "idle": int(report.idle), "pods": 1}
        if self._end_hung_at == math.inf and agree_to_end(report, board, certain=stall.certain):
            self._end_hung_at = now + bear_stall(self.pod.nodes, self._look_every, blames=True)
        cause = {} if report.cause else board.get("cause") or {}
        if cause != self._gives_way_to:
            self._gives_way_to = cause
            self._give_up_at = now + bear_stall(self.pod.nodes, self._look_every, blames=False)
            log(f"hang: in another pod, {cause['what'] if cause else 'no rank is waited for any more'}")
        given_up = stall.certain or (bool(cause) and report.stuck and are_all_stuck(board))
        return now >= self._end_hung_at or (given_up and now >= self._give_up_at)

    def _describe_hung(self, stall: Stall, worker: dict[str, Any], about: StalledRank) -> dict[str, Any]:
        """Return a rank's error file."""
        error = {key: worker[key] for key in ("rank", "localRank", "restart", "pid")}
        error.update(type=CATEGORY_HANG, traceback=worker.get("stack", ""), exitCode=128 + signal.SIGKILL)
        error["message"] = f"{stall.message}: {about.what}"
        blamed = any(one.behind for _, one in self._stalled)
        deadlock = not blamed and not self._gives_way_to and self._end_hung_at < math.inf
        error["victim"] = not (about.behind or deadlock) and (blamed or self.pod.nodes > 1)
        if error["victim"] and self._gives_way_to:
            error["message"] += f"; in another pod, {self._gives_way_to['what']}"
        elif deadlock:
            error["message"] += "; all ranks of the job wait: do they call the same collectives in the same order?"
        return error

    def _has_closed(self, worker: dict[str, Any]) -> bool:
        """Tell whether a rank has left its last page: it is done with training."""
        return os.path.exists(self._runtime("metrics", f"{worker['localRank']}.prom"))

    def _examine(
        self, stall: Stall, workers: list[dict[str, Any]], stacks: dict[int, Stack]
    ) -> list[tuple[dict[str, Any], StalledRank]]:
        """Return what each rank does instead of a step."""
        found = []
        for worker in workers:
            rank, local_rank = worker["rank"], worker["localRank"]
            stack = stacks.get(local_rank)
            worker["stack"] = stack.text if stack else ""
            if process_state(worker["pid"]) in _STOPPED:
                state, what = "Stopped", f"the process of rank {rank} is stopped (SIGSTOP)"
            elif stack is None or not stack.frames:
                state = "Waiting" if stall.certain or local_rank in stall.idle else "Busy"
                what = f"rank {rank} {'uses no CPU' if local_rank in stall.idle else 'shows no Python stack'}"
            elif stack.waits_for_peers:
                state, what = "Waiting", f"rank {rank} waits for other ranks in {stack.place}"
            else:
                behind = stall.certain or (local_rank in stall.idle and not stack.saves)
                state, what = "Behind" if behind else "Busy", f"rank {rank} is in {stack.place}"
            found.append((worker, StalledRank(rank, local_rank, state, what[:_WHAT_LIMIT])))
        return found

    def _show_stacks(self, workers: list[dict[str, Any]], *, quiet: bool = False) -> dict[int, Stack]:
        """Write the Python stacks of all ranks to the log, unless ``quiet``, and return them by local rank."""
        places = {one["localRank"]: os.path.join(self.pod.runtime, "stacks", str(one["localRank"])) for one in workers}
        able = [one for one in workers if one.get("kind") != "program" and process_state(one["pid"]) not in ("T", "t")]
        asked = [one for one in able if os.path.exists(places[one["localRank"]]) and catches(one["pid"], _STACK_SIGNAL)]
        before = {one["localRank"]: os.path.getsize(places[one["localRank"]]) for one in asked}
        for one in asked:
            self._kill(one["pid"], _STACK_SIGNAL)
        texts: dict[int, str] = {}
        begun = changed = time.monotonic()
        while time.monotonic() - begun < _SECONDS_FOR_STACKS:
            time.sleep(0.05)
            last, texts = texts, {rank: _read_from(places[rank], offset) for rank, offset in before.items()}
            if texts != last:
                changed = time.monotonic()
            settled = all(texts.values()) and time.monotonic() - changed > 1.0
            if settled or all(map(_is_whole, texts.values())):
                break
        for one in () if quiet else workers:
            head = f"---- rank {one['rank']} (pid {one['pid']}, state {process_state(one['pid']) or 'gone'}) ----"
            text = texts.get(one["localRank"])
            log(f"{head}\n{text or 'no stack: its process does not answer'}")
            others = self.metrics.threads(one["localRank"]) if text else ""
            if others:
                log(others)
        return {rank: read_stack(text) for rank, text in texts.items()}

    def _end_hung(self, stall: Stall) -> None:
        """End the workers; torchrun then starts them again or gives up, as for any other failure."""
        self._has_ended = True
        self._hangs += not stall.certain
        for worker, about in self._stalled:
            path = os.path.join(self.pod.runtime, "errors", f"{worker['localRank']}.json")
            try:
                write_json(path, {**self._describe_hung(stall, worker, about), "time": time.time()})
            except OSError as error:
                log(f"cannot write {path}: {error.strerror}")
        log("ending the workers because of the hang")
        for worker, _ in self._stalled:
            for pid in find_family(worker["pid"]):
                self._kill(pid, signal.SIGKILL)

    # -- ending

    def _linger(self) -> None:
        """Keep the store until the other agents have let go of it, so that none of them ends in a connection error."""
        failed = self._agent_status != 0 and self._stop_deadline is None
        deadline = time.monotonic() + _LINGER_SECONDS / (3 if failed else 1)
        while self._store and time.monotonic() < deadline and count_connections(self.pod.port) > 1:
            time.sleep(0.02)  # one connection is the store's own

    def _end_processes(self, keep: set[int]) -> None:
        """End the store, unless it is to be kept, and every orphan that came here."""
        if self._store_guard is not None and (not self._store or self._store not in keep):
            os.close(self._store_guard)
            self._store_guard = None
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self._reap()
            try:
                with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                    children = {int(pid) for pid in file.read().split()} - keep
            except (OSError, ValueError):
                return  # no Linux: torchrun has ended its workers
            if not children:
                return
            for pid in children:
                self._kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    def _conclude(self) -> int:
        """Write the termination message and the last lines of the log. Returns the exit code."""
        result = self._result.get("result")
        failure: dict[str, Any] = {"rank": None, "localRank": None, "traceback": "", "time": time.time()}
        if self.pod.elastic and self._result.get("type") == "RendezvousClosedError":
            log("training has ended without this pod")
            result = "ok"
        if result == "ok":
            report = {**self._report(failure, "", exit_code=0), **self._describe_groups()}
            return finish(Verdict("", EXIT_OK), report)
        if self._stop_deadline is not None and not self._final:
            verdict = _OWN_WORDS[EXIT_PREEMPTED]
            return finish(verdict, self._report(failure, "asked to stop by a signal", exit_code=EXIT_PREEMPTED))
        # Without a word of the agent about its workers, it lost its store before it saw how they ended.
        failures = self._final or self._failures or self._read_errors()
        if failures:
            failure = find_root(failures)
            if not failure["traceback"] or _EXITED.match(describe_root(failure)):
                failure = hear_last_lines(self.pod, failure)
            verdict = failure["verdict"]
            report = self._report_worker(failure, self.metrics.progress())
            if self._repeated and report["signature"]:
                report["repeated"] = True
                verdict = verdict._replace(exit_code=EXIT_USER_ERROR)
            return finish(verdict, report)
        failure["traceback"] = self._result.get("traceback", "")
        verdict, message = self._judge_agent()
        if self._cause:
            message += f"; the last restart was because of: {self._cause}"
        # An agent that the launcher itself has ended says nothing by how it ended.
        code = verdict.exit_code if self._result.get("type") == "MasterNotFound" else self._agent_status or 1
        return finish(verdict, self._report(failure, message, exit_code=code))

    def _describe_groups(self) -> dict[str, int]:
        """Return the ranks of the job and the size of the smallest process group of this pod's; nothing if unknown."""
        workers = self._workers()
        groups = [read_json(self._runtime("groups", f"{one['localRank']}.json")) for one in workers]
        sizes = [one["size"] for one in groups if isinstance(one.get("size"), int)]
        worlds = [one["worldSize"] for one in workers if isinstance(one.get("worldSize"), int)]
        if not workers or len(sizes) < len(workers) or len(worlds) < len(workers):
            return {}
        return {"worldSize": max(worlds), "groupSize": min(sizes)}

    def _read_errors(self) -> list[dict[str, Any]]:
        folder = os.path.join(self.pod.runtime, "errors")
        failures: list[dict[str, Any]] = []
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        for error in (read_json(os.path.join(folder, name)) for name in names):
            if all(isinstance(error.get(key), int) for key in ("rank", "localRank", "exitCode")):
                about = {key: error[key] for key in ("rank", "localRank", "exitCode")}
                empty = {"type": "", "message": "", "traceback": "", "time": time.time()}
                failures.append(judge(self.pod, {**about, **empty}))
        return failures

    def _read_final_errors(self) -> list[dict[str, Any]]:
        """Return the failures of workers that no restart follows; the agent may still be ending the other workers."""
        # After a restart the files are of the workers before, until the new ones run; without one they are of these,
        # also where the agent has had no time to say that it has started them.
        failures = self._read_errors() if self._phase == "Running" or not self._restarts else []
        last = (
            self._repeated
            or self._spent >= self._budget
            or any(one["verdict"].exit_code == EXIT_USER_ERROR for one in failures)
        )
        return failures if last else []

    def _judge_agent(self) -> tuple[Verdict, str]:
        """Judge an end that no worker caused."""
        kind, text = self._result.get("type", ""), self._result.get("message", "")
        whole, master = f"{kind}: {text}", f"{self.pod.master}:{self.pod.port}"
        if kind == "MasterNotFound":
            return Verdict(CATEGORY_NETWORK, EXIT_PEER_LOST, True), describe_absence(self.pod, text)
        if kind == "RendezvousTimeoutError":
            return (
                Verdict(CATEGORY_NETWORK, EXIT_PEER_LOST, True),
                f"not all {self.pod.nodes} pods joined the rendezvous at {master} within {self.pod.join_timeout:g} s. "
                "Check that all pods of the job are scheduled and running",
            )
        if kind.startswith("Rendezvous") or (_PEERS.search(whole) and _LOST.search(whole)):
            return Verdict(CATEGORY_NETWORK, EXIT_PEER_LOST, True), f"lost the rendezvous at {master}: {whole}"
        if kind == PreflightError.__name__:
            category = CATEGORY_NCCL if "nccl" in text.lower() else CATEGORY_NETWORK
            return Verdict(category, EXIT_RETRYABLE), f"the preflight failed: {text}"
        if kind == "ModuleNotFoundError":
            return Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR), f"{sys.executable} cannot run torchrun: {text}"
        if kind == "ArgumentError":
            return Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR), f"{text}; the log has its words"
        if kind:
            return Verdict(CATEGORY_UNKNOWN, EXIT_RETRYABLE), f"torchrun failed: {whole}"
        code = self._agent_status or 0
        verdict = classify(code, "", "", oom_killed=count_oom_kills() > self.pod.oom_kills)
        return verdict, f"torchrun's agent {name_exit(code)}"

    def _report_worker(self, failure: dict[str, Any], progress: dict[str, float]) -> dict[str, Any]:
        report = self._report(failure, describe_root(failure), exit_code=failure["exitCode"], progress=progress)
        step = self.metrics.step(failure["localRank"]) if self._failed_step is None else self._failed_step
        return {**report, "signature": build_signature(failure), "step": step}

    def _report(
        self, failure: dict[str, Any], message: str, *, exit_code: int, progress: dict[str, float] | None = None
    ) -> dict[str, Any]:
        return {
            "exitCode": exit_code if exit_code >= 0 else 128 - exit_code,
            "rank": failure["rank"],
            "localRank": failure["localRank"],
            "node": self.pod.node,
            "message": message,
            "traceback": failure["traceback"],
            "time": failure["time"],
            "restarts": self._restarts,
            "signature": "",
            "step": None,
            "repeated": False,
            "progress": self.metrics.progress() if progress is None else progress,
        }


def describe_preflight(report: dict[str, Any]) -> str:
    """Return the preflight's result in one line, and one for each problem."""
    figures = [f"{check} {1000 * seconds:.1f} ms" for check, seconds in report["seconds"].items()]
    if report["rate"] is not None:
        figures.append(f"all-reduce {report['rate'] / 1e6:.0f} MB/s")
    problems = [f"preflight: {check} failed: {text}" for check, text in report["problems"].items()]
    return "\n".join([f"preflight: {', '.join(figures) or 'nothing measured'}", *problems])


def build_stall_rows(stall: Stall, ranks: Sequence[StalledRank], now: float) -> list[str]:
    """Return a stall's series; none of one that may as well be a rank that computes while others wait for it."""
    report = report_stall(stall, ranks)
    if not (report.known or (report.stuck and (report.idle or report.cause))):
        return []
    rows = [f"# HELP {METRIC_STALLED} For how long this pod's ranks have made no step; only while they make none."]
    rows += [f"# TYPE {METRIC_STALLED} gauge", f"{METRIC_STALLED} {max(0.0, now - stall.since):.3f}"]
    rows.append(f"# HELP {METRIC_STALLED_RANK} What a rank of a stalled pod does; those that are waited for first.")
    rows.append(f"# TYPE {METRIC_STALLED_RANK} gauge")
    for one in sorted(ranks, key=lambda one: (STALLED_STATES.index(one.state), one.rank))[:_STALLED_RANKS_SHOWN]:
        what = one.what.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        rows.append(f'{METRIC_STALLED_RANK}{{rank="{one.rank}",state="{one.state}",what="{what}"}} 1')
    return rows


def build_preflight_rows(report: dict[str, Any]) -> list[str]:
    """Return the preflight's series; none before it was made."""
    if not report:
        return []
    checks = [check for check in PREFLIGHT_CHECKS if check in report["seconds"] or check in report["problems"]]
    rows = [f"# HELP {METRIC_PREFLIGHT_PASSED} Whether a check before training went well."]
    rows.append(f"# TYPE {METRIC_PREFLIGHT_PASSED} gauge")
    rows += [f'{METRIC_PREFLIGHT_PASSED}{{check="{one}"}} {int(one not in report["problems"])}' for one in checks]
    rows.append(f"# HELP {METRIC_PREFLIGHT_SECONDS} The longest lookup, connection, or all-reduce of one number.")
    rows.append(f"# TYPE {METRIC_PREFLIGHT_SECONDS} gauge")
    rows += [f'{METRIC_PREFLIGHT_SECONDS}{{check="{one}"}} {value:.6f}' for one, value in report["seconds"].items()]
    if report["rate"] is not None:
        rows.append(f"# HELP {METRIC_ALL_REDUCE_RATE} Bus bandwidth of an all-reduce over all ranks before training.")
        rows += [f"# TYPE {METRIC_ALL_REDUCE_RATE} gauge", f"{METRIC_ALL_REDUCE_RATE} {report['rate']:.0f}"]
    return rows


def describe_root(failure: dict[str, Any]) -> str:
    """Return in words how a worker failed."""
    if failure.get("left"):
        return f"{failure['left']} {_LEFT} when this rank still needed it: {_describe_failure(failure)}"
    return _describe_failure(failure)


def _describe_failure(failure: dict[str, Any]) -> str:
    if failure["type"] == CATEGORY_HANG:
        return str(failure["message"])
    if failure["type"] in ("", "SystemExit"):
        said = failure["message"] if failure["message"] != str(failure["exitCode"]) else ""
        return f"worker {name_exit(failure['exitCode'])}" + (f": {said}" if said else "")
    name = failure["type"].rpartition(".")[2]
    if not failure["message"]:  # as of a bare assert: the place says more than nothing
        places = re.findall(r'File "([^"]+)", line (\d+)', failure["traceback"])
        return f"{name} ({os.path.basename(places[-1][0])}, line {places[-1][1]})" if places else str(name)
    return f"{name}: {failure['message']}"


def read_json(path: str) -> dict[str, Any]:
    """Return a JSON object from a file that a worker wrote; nothing if it is not one."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            value = json.loads(file.read(_PAGE_LIMIT))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def build_message(verdict: Verdict, report: dict[str, Any]) -> dict[str, Any]:
    """Return a failure as a termination message has it."""
    hint = advise(verdict, report)
    if _LOCAL_POD in os.environ:
        hint = hint.partition("; `ddp run`")[0]  # that is where we are
    return {"version": 1, "category": verdict.category, **report, "hint": hint, "victim": verdict.victim}


def finish(verdict: Verdict, report: dict[str, Any]) -> int:
    """Write the termination message and the last lines of the log. Returns the launcher's exit code."""
    message = build_message(verdict, report)
    path = os.environ.get(ENV_TERMINATION_LOG)
    if path:
        try:
            with open(path, "wb") as file:  # in place: it is a bind mount
                file.write(fit_termination_message(message))
        except OSError as error:
            log(f"cannot write {path}: {error.strerror}")
    if verdict.exit_code != EXIT_OK:
        who = "" if report["rank"] is None else f"rank {report['rank']} (local rank {report['localRank']}): "
        words = [f"---- {verdict.category}{' (victim of another pod)' if verdict.victim else ''} ----"]
        words.append(f"pod {report['node']}, {who}{report['message']}")
        words.append(
            f"its exit code {report['exitCode']}, this pod's {verdict.exit_code}; restarts: {report['restarts']}"
        )
        if report["repeated"]:
            words.append(f"the same {report['signature']} twice without progress in between: not tried again")
        log("\n".join([*words, *([f"hint: {message['hint']}"] if message["hint"] else [])]))
    return verdict.exit_code


def make_runtime_dir() -> tuple[str, bool]:
    """Return the pod's private folder, and whether it is ours to remove."""
    given = os.environ.get(ENV_RUNTIME_DIR)
    places = [given] if given else [os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", os.getcwd()]
    problem: OSError | None = None
    for place in filter(None, places):
        path = place if given else os.path.join(place, f"ddp-{os.getpid()}-{os.urandom(6).hex()}")
        try:
            for name in ("metrics", "workers", "errors", "groups", "stacks", "output"):
                folder = os.path.join(path, name)
                os.makedirs(folder, mode=0o700, exist_ok=True)
                for stale in os.listdir(folder):
                    os.unlink(os.path.join(folder, stale))
            if os.path.exists(os.path.join(path, _STOPPING)):
                os.unlink(os.path.join(path, _STOPPING))
        except OSError as error:
            problem = error
            continue
        return path, not given
    raise ValueError(f"no folder for temporary files: {problem}; mount an emptyDir at /tmp")


def run_main(words: Sequence[str]) -> int:
    """``run <torchrun flags> -- <command>``."""
    index = os.environ.get(ENV_COMPLETION_INDEX, "")
    node = int(index) if index.isdigit() else 0
    nothing: dict[str, Any] = {"rank": None, "localRank": None, "traceback": "", "time": time.time(), "restarts": 0}
    nothing.update(progress={}, exitCode=EXIT_USER_ERROR, node=node, signature="", step=None, repeated=False)
    refused = Verdict(CATEGORY_USER_ERROR, EXIT_USER_ERROR)
    flags = list(words[: words.index("--")]) if "--" in words else list(words)
    command = list(words[len(flags) + 1 :])
    program = "--no-python" in flags
    runtime, ours = "", False
    try:
        if not command:
            raise ValueError("no training command after --")
        line = None if program else split_python_line(command)
        missing = find_missing_program(line, command)
        if missing:
            raise ValueError(missing)
        runtime, ours = make_runtime_dir()
        elastic = any(flag.startswith("--nnodes=") and ":" in flag for flag in flags)
        pod = read_pod(dict(os.environ), runtime)._replace(elastic=elastic, program=program)
    except ValueError as error:
        return finish(refused, {**nothing, "message": str(error)})
    flags = [flag for flag in flags if flag != "--no-python"]
    if not any(flag.startswith("--log-dir") for flag in flags):
        flags.append(f"--log-dir={os.path.join(runtime, 'torchrun')}")
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun would take its defaults from them
    threads = default_threads(os.environ.get(ENV_NPROC_PER_NODE, ""))
    if threads:
        os.environ.setdefault(ENV_OMP_NUM_THREADS, threads)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Without it restarted workers read stale addresses from the agent's store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[ENV_RUNTIME_DIR] = runtime
    own = [sys.executable, "-u", *(line.flags if line else []), os.path.abspath(__file__), "worker"]
    kind, what = ("program", command) if line is None else (line.kind, [line.target, *line.args])
    try:
        return Launcher(pod, add_pod_flags(flags, pod), [*own, kind, "${local_rank}", *what]).run()
    except Exception as error:
        broken = describe(error)
        message = f"the launcher itself failed: {broken['type']}: {broken['message']}"
        return finish(
            Verdict(CATEGORY_UNKNOWN, EXIT_RETRYABLE), {**nothing, "message": message, "traceback": broken["traceback"]}
        )
    finally:
        if ours:
            import shutil

            shutil.rmtree(runtime, ignore_errors=True)


def main() -> int:
    """Run the subcommand."""
    own = os.path.dirname(os.path.abspath(__file__))
    words = sys.argv[1:]
    if words[:1] == ["worker"]:
        worker_main(words[1:])
    if sys.path and os.path.abspath(sys.path[0]) == own:
        del sys.path[0]  # the launcher's folder must not hide the user's modules
    if words[:1] == ["run"]:
        return run_main(words[1:])
    sys.stderr.write(__doc__ or "")
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
