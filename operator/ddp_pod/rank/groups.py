"""Record the default process group that a process creates or waits for: of a rank, and of processes that it starts.

The hooks are on functions that ``init_process_group`` calls, because a script may have bound that one before.
"""

import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from ..base.files import read_json, write_json
from .hooks import ImportHook
from .script_objects import list_names
from .tracebacks import ScriptCall, find_call, read_source

_MODULE = "torch.distributed.distributed_c10d"
# With these a program may communicate without a process group of PyTorch.
_LIBRARIES = ("jax", "mpi4py", "horovod", "ray", "torchft")
SLOTS = 64  # records of a rank
_TEXT_LIMIT = 120
_SETS_ADDRESS = re.compile(r"MASTER_(?:ADDR|PORT)\b['\"]?\s*(?:\]\s*=(?!=)|=(?!=)|:)")
_LOCAL_RANK_OPTION = re.compile(r"""add_argument\([^)\n]{0,200}?["'](--local[_-]rank)["']""")

# Phases of a process.
CONNECTING = "Connecting"  # to the store, in init_process_group
JOINING = "Joining"  # connected to the store; waits for the other members
MEMBER = "Member"
LEFT = "Left"  # the group was destroyed
STEPPING = "Stepping"  # has made an optimizer step without a group
ENDED = "Ended"  # has ended without an error, a group or a step


class GroupRecord(NamedTuple):
    """The default process group of one process.

    ``size``, ``rank``, ``store``, ``place``: of the last call of init_process_group, at a line of the script;
    ``assigned``: the line that sets the store's address; ``from_environment``: whether MASTER_ADDR and
    MASTER_PORT have it;
    ``largest``, ``largest_rank``: of the largest group so far; ``run``: torchrun's id; ``library``: which may
    communicate instead; ``option``: of the script, which would have enabled training in a group.
    """

    pid: int = 0
    phase: str = ""
    since: float = 0.0
    size: int = 0
    rank: int = 0
    store: str = ""
    place: str = ""
    assigned: str = ""
    from_environment: bool = False
    largest: int = 0
    largest_rank: int = 0
    run: str = ""
    library: str = ""
    option: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the process waits for its first group, or has ended while it waited."""
        return self.phase in (CONNECTING, JOINING) and not self.largest


class GroupRecorder(ImportHook):
    """Writes the record of this process and of its forked children, without importing torch.

    ``pipe``: where the launcher requests a report of the group's collectives; empty: it does not.
    """

    def __init__(self, runtime: str, local_rank: int, pipe: str = "") -> None:
        super().__init__(_MODULE)
        self._prefix = os.path.join(runtime, "groups", str(local_rank))
        self._path = ""  # of this process's record; empty: it has none
        self._pipe = pipe
        self._pid = os.getpid()
        self._address = read_address()
        self._record = GroupRecord()

    def watch(self, module: Any) -> None:
        """Record the default group whenever the program creates one."""
        wrappers = {
            "rendezvous": self._wrap_rendezvous,
            "_new_process_group_helper": self._wrap_helper,
            "_update_default_pg": self._wrap_update,
        }
        for name, wrap in wrappers.items():
            function = getattr(module, name, None)
            if function is None:
                self._blind = True
            else:
                setattr(module, name, wrap(function))

    @property
    def place(self) -> str:
        """The line that created the default process group; empty: none did."""
        return self._read().place

    def note_step(self) -> None:
        """Record the first optimizer step, if no group precedes it."""
        if not self._read().largest:
            self._note(STEPPING, library=self._find_library(), option=_find_unused_option())

    def close(self) -> None:
        """Record that the program has succeeded without a group and without a step."""
        if not self._read().phase:
            self._note(ENDED, library=self._find_library())

    def _wrap_rendezvous(self, rendezvous: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def rendezvous_and_record(*arguments: Any, **options: Any) -> Iterator[Any]:
            with suppress(Exception):
                self._note_call(*arguments)
            for joined in rendezvous(*arguments, **options):
                self._note(JOINING, size=joined[2], rank=joined[1])
                yield joined

        return rendezvous_and_record

    def _wrap_helper(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def create_and_record(*arguments: Any, **options: Any) -> Any:
            with suppress(Exception):
                self._note_store(*arguments[:5])
            return create(*arguments, **options)

        return create_and_record

    def _wrap_update(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def update_and_record(group: Any) -> Any:
            result = update(group)
            with suppress(AttributeError, TypeError, ValueError):  # this process is no member
                self._note_group(group)
            self._report_collectives()
            return result

        return update_and_record

    def _note_call(self, url: Any, rank: Any = -1, size: Any = -1) -> None:
        """Record that the process connects to a store. ``rank``, ``size``: negative if the environment has them."""
        address = read_address()
        call = find_call()
        url = url if type(url) is str else ""
        from_environment = url.startswith("env:")
        store = address if from_environment else url.partition("?")[0].replace("tcp://", "")
        self._note(
            CONNECTING,
            size=_choose_number(size, "WORLD_SIZE"),
            rank=_choose_number(rank, "RANK"),
            store=store[:_TEXT_LIMIT],
            place=call.place,
            assigned=_find_assignment(call) if from_environment and address != self._address else "",
            from_environment=from_environment,
        )

    def _note_store(self, size: int, rank: int, ranks: Any, backend: Any, store: Any) -> None:
        """Record that the process joins with a store that the script has passed. ``ranks``: of a subgroup."""
        is_default = type(ranks) in (list, tuple) and not ranks
        if is_default and type(size) is int and size > 0 and self._read().phase != JOINING:
            self._note(JOINING, size=size, rank=rank, store=_name_store(store), place=find_call().place)

    def _note_group(self, group: Any) -> None:
        """Record a new default group, or that it was destroyed. Raises: AttributeError, TypeError, ValueError."""
        if group is None:
            self._note(LEFT)
            return
        size = int(group.size())
        rank = int(group.rank())
        largest = {"largest": size, "largest_rank": rank} if size >= self._read().largest else {}
        self._note(MEMBER, size=size, rank=rank, **largest)

    def _read(self) -> GroupRecord:
        """Return the record of this process: a forked child begins with an empty one."""
        if self._record.pid != os.getpid():
            self._record = GroupRecord(os.getpid(), run=os.environ.get("TORCHELASTIC_RUN_ID", "")[:_TEXT_LIMIT])
            self._path = ""
        return self._record

    def _note(self, phase: str, **values: Any) -> None:
        """Change the record and write it. Never raises."""
        try:
            self._record = self._read()._replace(phase=phase, since=time.time(), **values)
            self._path = self._path or self._claim_path()
            if self._path:
                write_json(self._path, self._record._asdict())
        except Exception:  # a full disk, or a bug: the group stays unknown
            pass

    def _claim_path(self) -> str:
        """Return the path of this process's record: a free one, or one whose record says less; empty: there is none.

        Raises: OSError.
        """
        for path in self._list_paths():
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                return path
        return next((path for path in self._list_paths() if self._says_more_than(read_json(path))), "")

    def _list_paths(self) -> Iterator[str]:
        for slot in range(SLOTS):
            yield f"{self._prefix}.{(os.getpid() + slot) % SLOTS}.json"

    def _says_more_than(self, other: Mapping[str, Any]) -> bool:
        """Return whether this process has a group, or a step, and another process has not."""
        if other.get("largest"):
            return False
        return bool(self._record.largest) or (self._record.phase != ENDED and other.get("phase") == ENDED)

    def _report_collectives(self) -> None:
        """Start to report collectives with the first group. A forked child does not: it shares the pipe."""
        if not self._pipe or os.getpid() != self._pid:
            return
        path = self._pipe
        self._pipe = ""
        try:
            importlib.import_module(f"{__package__}.collectives").start_reporter(path)
        except (OSError, RuntimeError):
            pass  # no pipe, or no thread: the stack shows where the rank waits

    def _find_library(self) -> str:
        """Return what may communicate instead of a process group; empty if nothing does."""
        if self._blind:
            return "an unknown version of torch.distributed"
        if getattr(sys.modules.get("torch.distributed.rpc"), "_init_counter", 0):
            return "torch.distributed.rpc"
        return next((name for name in _LIBRARIES if name in sys.modules), "")


def _find_assignment(call: ScriptCall) -> str:
    """Return the last line before the call that sets the store's address; empty without one in the same file."""
    lines = read_source(call.path).splitlines()[: call.line]
    numbers = [number for number, text in enumerate(lines, 1) if _SETS_ADDRESS.search(text)]
    return call._replace(line=numbers[-1]).place if numbers else ""


def read_address() -> str:
    """Return the address of the store in this process's environment."""
    return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"


def _choose_number(value: Any, variable: str) -> int:
    """Return the script's number, or that of a variable if it passes none."""
    return int(value) if type(value) is int and value >= 0 else int(os.environ[variable])


def _name_store(store: Any) -> str:
    """Return the address of a store that the script has created."""
    name = list_names(type(store))[0]
    is_known = type(store) is getattr(sys.modules[_MODULE], "TCPStore", None)
    return f"{store.host}:{store.port}"[:_TEXT_LIMIT] if is_known else name[:_TEXT_LIMIT]


def _find_unused_option() -> str:
    """Return the option of torch.distributed.launch that the script knows and was not started with; empty: none."""
    if any(word.startswith("--local") for word in sys.argv):
        return ""
    match = _LOCAL_RANK_OPTION.search(read_source(getattr(sys.modules["__main__"], "__file__", "") or ""))
    return match[1] if match else ""
