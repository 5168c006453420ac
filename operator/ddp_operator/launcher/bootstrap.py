"""The first process of every training pod: it runs torchrun and reports how the pod ended and why.

    launcher.py run <torchrun flags> -- <arguments of `python`>
    launcher.py run <torchrun flags> --no-python -- <program> …
    launcher.py fetch               (in a pod without GPUs: fetch the job's inputs before the training pods start)
    launcher.py worker …            (internal: a rank in a new interpreter)
    launcher.py forkserver …        (internal: import PyTorch once for the agent and the ranks)
    launcher.py tracking …          (internal: find the job's run in MLflow)
    launcher.py mirror …            (internal: fetch and upload the checkpoint folder)

The operator mounts it as launcher.py into any image that has Python >= 3.9 and torch >= 2.2. The files beside it are
the packages ``ddp_launcher.contract`` and ``ddp_launcher.launcher``; ``_FlatFinder`` finds their modules. Each process
of a pod dies with its parent:

    supervisor (standard library)  ->  fork server (imports torch)
                                   ->  mirror of checkpoint.url, if set (imports fsspec)
                                   ->  torchrun's agent (forked from it)  ->  its fork server
                                                                          ->  workers (forked from that, in the shim)
                                                                          ->  on pod 0 the rendezvous store

``docs/pod-contract.md`` has the environment, the exit codes and the files that the launcher reads and writes.
"""

import signal
import sys

_SIGNALS: list[int] = []  # received and not handled yet
if __name__ == "__main__" and sys.argv[1:2] in (["run"], ["fetch"]):
    # The kernel drops signals for which a container's first process has no handler. Without these handlers, before
    # any slow import, a pod that is deleted right after its start would run for its whole grace period.
    for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(_number, lambda received, frame: _SIGNALS.append(received))

import importlib
import importlib.util
import os
import types
from importlib.machinery import ModuleSpec
from typing import Optional

PACKAGE = "ddp_launcher"
_SUBCOMMANDS = ("run", "fetch", "worker", "forkserver", "tracking", "mirror")


def main() -> int:
    """Run the subcommand. Returns the exit code."""
    subcommand = sys.argv[1] if len(sys.argv) > 1 else ""
    argv = sys.argv[2:]
    if subcommand not in _SUBCOMMANDS:
        sys.stderr.write(__doc__ or "")
        return 81
    _register_package()

    # Each subcommand imports only its own modules: every rank would compile the rest again.
    if subcommand == "tracking":
        return int(_import("rank.tracking").main(argv))
    if subcommand == "fetch":
        return int(_import("transfer.fetch").main(_SIGNALS))
    if subcommand == "mirror":
        return int(_import("transfer.mirror").main(argv))
    if subcommand == "run":
        return int(_import("main").main(argv, _SIGNALS))
    if subcommand == "forkserver":
        # It returns only in a forked rank, with the arguments of the rank's shim.
        argv = _import("torchrun.fork_server").serve(argv)
    _import("rank.worker").main(argv)  # raises SystemExit
    return 0


def _register_package() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    # The launcher's modules must not shadow the user's. Python puts the folder of the real file first in sys.path,
    # behind the symbolic links that a kubelet creates for a ConfigMap.
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
        del sys.path[0]
    package = types.ModuleType(PACKAGE)
    package.__path__ = []
    sys.modules[PACKAGE] = package
    sys.meta_path.insert(0, _FlatFinder(folder))


class _FlatFinder:
    """Finds ``ddp_launcher.a.b`` in the file ``a.b.py``: a ConfigMap has no folders."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files = frozenset(name for name in os.listdir(folder) if name.endswith(".py"))

    def find_spec(self, name: str, path: object = None, target: object = None) -> Optional[ModuleSpec]:
        """Return the spec of a module or a package of the launcher; None for every other name."""
        root, _, key = name.partition(".")
        if root != PACKAGE:
            return None

        file = f"{key}.py"
        if any(other.startswith(f"{key}.") and other != file for other in self._files):
            return ModuleSpec(name, None, is_package=True)
        if file in self._files:
            return importlib.util.spec_from_file_location(name, os.path.join(self._folder, file))
        return None


def _import(name: str) -> types.ModuleType:
    return importlib.import_module(f"{PACKAGE}.launcher.{name}")


if __name__ == "__main__":
    sys.exit(main())
