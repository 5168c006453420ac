"""What a rank's program makes of torch's process groups, recorded without importing torch."""

from __future__ import annotations

import os
import sys
from typing import Any

from .files import read_json, write_json

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
