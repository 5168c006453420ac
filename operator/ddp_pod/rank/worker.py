"""The worker shim: every rank starts here and becomes the user's program."""

import atexit
import errno
import glob
import importlib
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..base.files import write_json
from ..base.runtime_files import CHILD_ERROR, ENDING, FINISHED, MAPPINGS, OWN_END, SHELL_END
from ..contract.names import ENV_AGENT_PID, ENV_LAUNCHER_CONFIG, ENV_RANK_FEATURES, ENV_RUNTIME_DIR, PAGES
from ..contract.processes import STACK_SIGNAL, set_parent_death_signal
from . import counter_slots, counters
from .failing_code import find_failing_code
from .groups import GroupRecorder, read_address
from .helper_errors import observe_helpers
from .own_ends import observe_own_ends
from .shell_ends import observe_shell
from .tracebacks import find_exit_code, hide_own_frames, record_exception

if TYPE_CHECKING:
    from .part import CreateSampler, RankPart, StepObserver

_SOCKET_NAME = 107  # bytes; unix(7)
_SHORT_FOLDER = "/tmp"  # nosec B108 - mkdtemp creates a folder of its own in it


class _RankFiles:
    """The files of one rank in the runtime directory."""

    def __init__(self, runtime: str, local_rank: str) -> None:
        self.worker = os.path.join(runtime, "workers", f"{local_rank}.json")
        self.error = os.path.join(runtime, "errors", f"{local_rank}.json")
        self.groups = os.path.join(runtime, "groups", local_rank)
        self.collectives = f"{self.groups}.collectives"
        self.metrics = os.path.join(runtime, "metrics", local_rank)
        self.stacks = os.path.join(runtime, "stacks", local_rank)
        self.output = os.path.join(runtime, "output", local_rank)
        self.ending = f"{self.output}.{ENDING}"
        self.finished = f"{self.output}.{FINISHED}"
        self.mappings = f"{self.output}.{MAPPINGS}"
        self.own_end = f"{self.output}.{OWN_END}"
        self.shell_end = f"{self.output}.{SHELL_END}"


def main(argv: Sequence[str], load_part: "Callable[[str], RankPart]") -> NoReturn:
    """Become the user's program. ``argv``: kind, local rank, target and the target's arguments.

    ``load_part``: returns a feature's part in a rank.
    """
    kind, local_rank, target = argv[:3]
    args = list(argv[3:])
    set_parent_death_signal(int(os.environ.pop(ENV_AGENT_PID, os.getppid())))
    runtime = os.environ[ENV_RUNTIME_DIR]
    files = _RankFiles(runtime, local_rank)
    divert_output(files.output)
    reopen_output()
    _remove_stale_files(files)

    about = {
        "pid": os.getpid(),
        "rank": int(os.environ.get("RANK", "0")),
        "localRank": int(local_rank),
        "worldSize": int(os.environ.get("WORLD_SIZE", "1")),
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "started": time.time(),
        "kind": kind,
        "store": read_address(),
        "run": os.environ.get("TORCHELASTIC_RUN_ID", ""),
    }
    write_json(files.worker, about)
    slot = _open_slot(runtime, about)
    parts: Sequence[RankPart] = ()
    if ENV_RANK_FEATURES in os.environ:  # a rank without one imports nothing for it
        from .part import load_parts, prepare

        parts = load_parts(load_part)
        prepare(parts)

    _observe_children(runtime, int(local_rank))
    if kind == "program":
        _execute_program(target, args, files, about)
    _enable_stacks(files.stacks)
    _shorten_socket_names()
    groups = GroupRecorder(runtime, int(local_rank), files.collectives)
    groups.start()
    observe_helpers(find_failing_code)
    observe_own_ends(files.own_end)
    if slot is not None:
        _count_steps(slot, groups, about, files, parts)
    _run_and_record(kind, target, args, files, about, groups)


def _open_slot(runtime: str, about: dict[str, Any]) -> Any:
    """Return this rank's counters, reset for this process; None if the launcher keeps none."""
    try:
        slot = counter_slots.open_slot(runtime, about["localRank"])
    except (OSError, ValueError):
        return None
    slot[counters.RANK] = about["rank"]
    slot[counters.WORLD_SIZE] = about["worldSize"]
    slot[counters.PID] = about["pid"]
    return slot


def _count_steps(
    slot: Any, groups: GroupRecorder, about: dict[str, Any], files: _RankFiles, parts: "Sequence[RankPart]"
) -> None:
    """Count this rank's optimizer steps. The import takes milliseconds, which a job without counters does not need."""
    from .mapped_files import keep_mapped_files
    from .steps import StepCounter

    observers: tuple[StepObserver, ...] = ()
    create_sampler: CreateSampler | None = None
    if parts:
        from .part import create_observers, find_sampler

        observers = create_observers(parts, about, groups)
        create_sampler = find_sampler(parts)

    def claim() -> Any:
        groups.note_step()
        keep_mapped_files(files.mappings)
        return counter_slots.take_slot(slot)

    StepCounter(slot, claim, observers, create_sampler).start()


def _observe_children(runtime: str, local_rank: int) -> None:
    try:
        importlib.import_module(f"{__package__}.child").set_python_path(runtime, local_rank)
    except OSError:
        pass  # the folder is full: their steps and groups stay invisible


def _remove_stale_files(files: _RankFiles) -> None:
    groups = glob.glob(f"{glob.escape(files.groups)}.*")
    for path in (
        files.error,
        files.ending,
        files.finished,
        f"{files.output}.end",
        f"{files.output}.{CHILD_ERROR}",
        files.mappings,
        files.own_end,
        files.shell_end,
        *groups,
        *(f"{files.metrics}.{page}" for page in PAGES),
    ):
        try:
            os.unlink(path)
        except OSError:
            pass  # the former process left none


def _execute_program(target: str, args: list[str], files: _RankFiles, about: dict[str, Any]) -> NoReturn:
    try:
        observe_shell(files.shell_end)
    except OSError:
        pass  # the folder is full: the command stays unknown
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(target, [target, *args])  # noqa: S606
    except OSError as error:
        # The launcher has found the program: what does not exist is its loader.
        number = errno.ENOEXEC if error.errno == errno.ENOENT else error.errno
        record_exception(OSError(number, error.strerror, target), files.error, about)
        sys.stderr.write(f"{target}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _enable_stacks(path: str) -> None:
    """Have this rank write its stack on STACK_SIGNAL, and on a crash in native code."""
    import faulthandler

    stacks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    # Only the main thread: faulthandler walks the list of threads without a lock, so that a rank crashes if a thread
    # ends meanwhile, such as that of a finished scrape (1 of 230 times). The kernel signals the main thread.
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False, chain=False)
    if sys.stderr is not None:
        faulthandler.enable()


def _shorten_socket_names() -> None:
    """Let multiprocessing keep its sockets in a folder with a short name if that of TMPDIR is too long for them.

    DataLoader workers would fail to send their batches, and the rank would wait for them without an error.
    """
    folder = os.path.join(os.environ.get("TMPDIR", ""), "pymp-xxxxxxxx", "listener-xxxxxxxx")
    if len(os.fsencode(folder)) <= _SOCKET_NAME:
        return
    import tempfile
    from multiprocessing import process

    try:
        short = tempfile.mkdtemp(prefix="pymp-", dir=_SHORT_FOLDER)
    except OSError:
        return  # the script's error will say what is wrong
    vars(process.current_process())["_config"]["tempdir"] = short
    atexit.register(shutil.rmtree, short, ignore_errors=True)


def _run_and_record(
    kind: str, target: str, args: list[str], files: _RankFiles, about: dict[str, Any], groups: GroupRecorder
) -> NoReturn:
    """Run the user's program; record its exception, but not those of forked children."""
    pid = os.getpid()
    end = _End(files.finished)
    atexit.register(end.note)  # before the program registers handlers, as the last one is called first
    try:
        _run_python(kind, target, args)
    except BaseException as error:
        hide_own_frames()
        if os.getpid() == pid:
            if find_exit_code(error) == 0:
                groups.close()
                _guard_end(files)
                end.succeeded = True
            record_exception(error, files.error, about)
        raise
    if os.getpid() == pid:
        groups.close()
        _guard_end(files)
        end.succeeded = True
    raise SystemExit(0)


class _End:
    """Notes that a program has succeeded and its exit handlers have run. The interpreter's own end may still crash.

    Threads of gloo abort the process if they release a tensor then (pytorch#190489).
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()
        self.succeeded = False

    def note(self) -> None:
        if self.succeeded and os.getpid() == self._pid:
            try:
                write_json(self._path, {"pid": self._pid})
            except OSError:
                pass  # the folder is full or gone: a crash then counts as a failure


def _guard_end(files: _RankFiles) -> None:
    """Limit what follows the program: threads, exit handlers and children for which the interpreter waits."""
    from ..contract.plan import decode_plan
    from .ending import guard_end

    try:
        watchdog = decode_plan(os.environ.get(ENV_LAUNCHER_CONFIG)).watchdog
    except ValueError:
        return  # the script has cleared its environment
    guard_end(watchdog, files.ending)


def _run_python(kind: str, target: str, args: list[str]) -> None:
    """Run the user's program as ``__main__``, as the interpreter itself would."""
    import builtins
    import types

    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    main_module.__dict__["__loader__"] = None
    bootstrap = sys.modules["__main__"]
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:  # the name under which multiprocessing's children know the main module
        sys.modules["__mp_main__"] = main_module

    sys.argv = [target, *args]
    extends_path = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    if kind == "module":
        if extends_path:
            sys.path.insert(0, os.getcwd())
        sys.argv[0] = "-m"
        importlib.import_module("runpy")._run_module_as_main(target)
    elif kind == "code":
        if extends_path:
            sys.path.insert(0, "")
        sys.argv[0] = "-c"
        exec(compile(target, "<string>", "exec"), main_module.__dict__)  # noqa: S102 # nosec B102
    elif os.path.isdir(target) or (not target.endswith(".py") and _is_archive(target)):
        sys.path.insert(0, os.path.abspath(target))
        importlib.import_module("runpy")._run_module_as_main("__main__", False)
    else:
        if extends_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
        _run_script(target, main_module)
    del bootstrap  # keep the bootstrap's globals alive until the program has ended


def _run_script(target: str, main_module: Any) -> None:
    from importlib.machinery import SourceFileLoader

    try:
        target = os.path.abspath(target)
        with open(target, "rb") as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {target!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from error
    loader = SourceFileLoader("__main__", target)
    vars(main_module).update(__file__=target, __cached__=None, __loader__=loader)
    exec(compile(source, target, "exec"), main_module.__dict__)  # noqa: S102 # nosec B102


def _is_archive(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def divert_output(path: str) -> None:
    """Write this worker's output to the pipe of the launcher's reader, if one reads it."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return  # no reader has opened the pipe
    os.set_blocking(pipe, True)
    sys.stdout.flush()
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)


def reopen_output() -> None:
    """Adapt stdout and stderr to the files that they have now, as the start of an interpreter does.

    They were created for other files: those of torchrun's worker, or of the fork server. Python believes that it can
    seek in a pipe if it could in the former file; then ``reconfigure`` fails. The objects stay the same, because
    imported modules have references to them, such as the handlers of ``logging``.
    """
    for number, stream in enumerate((sys.__stdout__, sys.__stderr__), 1):
        if not isinstance(stream, io.TextIOWrapper):
            continue  # it is closed
        name = stream.name
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it is closed with the interpreter
        vars(raw)["name"] = name
        io.TextIOWrapper.__init__(
            stream,
            raw,
            encoding=stream.encoding,
            errors=stream.errors,
            newline="\n",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
