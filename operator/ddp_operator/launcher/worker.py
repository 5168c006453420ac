"""The worker shim: every rank starts here, and then is the user's program. Its process groups are recorded."""

import errno
import importlib
import os
import sys
import time
from typing import Any, NoReturn, Sequence

from .contract import ENV_AGENT_PID, ENV_RUNTIME_DIR, ENV_TRACKING_RUN, PAGES, TRAINER_STATUS_FILE
from .files import read_json, write_json
from .import_hook import ImportHook
from .loopback import StoreHook
from .processes import STACK_SIGNAL, set_parent_death_signal
from .tracebacks import hide_own_frames, record_exception

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


class GroupRecorder(ImportHook):
    """Records the size of the default process group that a rank's program initializes, without importing torch.

    Forked children of the rank record as well.
    """

    def __init__(self, path: str) -> None:
        super().__init__(_GROUPS_MODULE)
        self._path = path

    def watch(self, module: Any) -> None:
        """Record the groups that are made from now on."""
        update = getattr(module, "_update_default_pg", None)
        if update is None:
            self._blind = True
            return

        def update_and_record(group: Any) -> Any:
            result = update(group)
            try:
                size = int(group.size())
                if size > read_json(self._path).get("size", 0):
                    write_json(self._path, {"size": size})
            except (AttributeError, TypeError, ValueError, OSError):
                pass  # no group any more, or none of this rank's
            return result

        module._update_default_pg = update_and_record

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


# As Kubeflow's Trainer calls them.
_URL, _TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"  # nosec B105


def worker_main(words: Sequence[str]) -> NoReturn:
    """``worker <kind> <local rank> <target> …``: become the user's program."""
    kind, local_rank, target, args = words[0], words[1], words[2], list(words[3:])
    set_parent_death_signal(int(os.environ.pop(ENV_AGENT_PID, os.getppid())))
    runtime = os.environ[ENV_RUNTIME_DIR]
    divert_output(os.path.join(runtime, "output", local_rank))
    error_file = os.path.join(runtime, "errors", f"{local_rank}.json")
    metrics = os.path.join(runtime, "metrics", local_rank)
    group_file = os.path.join(runtime, "groups", f"{local_rank}.json")
    for stale in (error_file, group_file, *(f"{metrics}.{kind}" for kind in PAGES)):
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
    _name_trainer_status(runtime, local_rank)
    if ENV_TRACKING_RUN in os.environ:
        importlib.import_module(f"{__package__}.tracking").set_rank_variables()
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
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False, chain=False)
    if sys.stderr is not None:
        faulthandler.enable()  # a crash in native code says at least where the script was
    pid = os.getpid()
    groups = GroupRecorder(group_file)
    groups.start()
    StoreHook().start()
    try:
        _run_python(kind, target, args)
    except BaseException as error:
        if os.getpid() == pid:
            if isinstance(error, SystemExit) and not error.code:
                groups.close()
            record_exception(error, error_file, about)
        hide_own_frames()
        raise
    if os.getpid() == pid:
        groups.close()
    raise SystemExit(0)


def _run_python(kind: str, target: str, args: list[str]) -> None:
    """Run the user's program as ``__main__``, as the interpreter itself would."""
    import builtins
    import types

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    bootstrap, sys.modules["__main__"] = sys.modules["__main__"], main
    if "__mp_main__" in sys.modules:  # what children of multiprocessing call it, imported before there was a program
        sys.modules["__mp_main__"] = main
    main.__dict__["__loader__"] = None
    sys.argv = [target, *args]
    unsafe = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    if kind == "module":
        if unsafe:
            sys.path.insert(0, os.getcwd())
        sys.argv[0] = "-m"
        importlib.import_module("runpy")._run_module_as_main(target)
    elif kind == "code":
        if unsafe:
            sys.path.insert(0, "")
        sys.argv[0] = "-c"
        exec(compile(target, "<string>", "exec"), main.__dict__)  # noqa: S102 # nosec B102
    elif os.path.isdir(target) or (not target.endswith(".py") and _is_archive(target)):
        sys.path.insert(0, os.path.abspath(target))
        importlib.import_module("runpy")._run_module_as_main("__main__", False)
    else:
        if unsafe:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
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
    del bootstrap  # alive until here, so that its globals are too


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _name_trainer_status(runtime: str, local_rank: str) -> None:
    """Set the variables by which a script finds the endpoint, unless it has others, as in a pod of Kubeflow's."""
    offer = read_json(os.path.join(runtime, TRAINER_STATUS_FILE))
    if not offer or _URL in os.environ:
        return
    os.environ[_URL] = f"http://127.0.0.1:{offer['port']}/trainer-status/{local_rank}/{os.getpid()}"
    os.environ[_TOKEN] = offer["token"]
    for name in ("no_proxy", "NO_PROXY"):
        if any(proxy in os.environ for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))


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
