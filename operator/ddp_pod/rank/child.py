"""Observe the Python processes that a rank's program starts, as ``bash train.sh`` and ``mp.spawn`` do.

The shim puts a folder with a ``sitecustomize.py`` first in PYTHONPATH. Each process records its process group. The
first one whose optimizer steps counts in the rank's slot, unless the rank's own process does. Interpreters that ignore
PYTHONPATH (``python -E``, ``-I``) stay invisible.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..base.exceptions import FailingCode
from ..base.files import BOOTSTRAP, read_json
from ..base.runtime_files import MAPPINGS, OWN_END
from ..contract.names import ENV_RANK_FEATURES
from . import counter_slots
from .end_notes import note_path
from .groups import GroupRecorder
from .helper_errors import observe_helpers
from .hooks import ImportHook
from .own_ends import observe_own_ends

if TYPE_CHECKING:
    from .part import CreateSampler, RankPart, StepObserver

_OPTIMIZERS = "torch.optim.optimizer"
_SITECUSTOMIZE = """\
import sys
sys.path.remove({folder!r})
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # the environment's own one
except ImportError:
    sys.modules["sitecustomize"] = own
class BeforeTorch(object):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            import importlib.util
            spec = importlib.util.spec_from_file_location("ddp_launcher_bootstrap", {bootstrap!r})
            bootstrap = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(bootstrap)
            bootstrap.observe_child({runtime!r}, {local_rank!r})
        except Exception:  # another Python: it stays invisible
            pass
sys.meta_path.insert(0, BeforeTorch())
"""


def set_python_path(runtime: str, local_rank: int) -> None:
    """Have the Python processes that this rank starts observe themselves. Raises: OSError."""
    folder = os.path.join(runtime, "site", str(local_rank))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    text = _SITECUSTOMIZE.format(folder=folder, bootstrap=BOOTSTRAP, runtime=runtime, local_rank=local_rank)
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(text)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


class ChildHook(ImportHook):
    """Counts the steps of this process once it has imported PyTorch's optimizers. Records its process group."""

    def __init__(self, runtime: str, local_rank: int, load_part: "Callable[[str], RankPart]") -> None:
        super().__init__(_OPTIMIZERS)
        self._load_part = load_part
        self._runtime = runtime
        self._local_rank = local_rank
        self._groups = GroupRecorder(runtime, local_rank)

    def start(self) -> None:
        """Watch for the imports of PyTorch."""
        self._groups.start()
        from .child_errors import record_uncaught

        record_uncaught(self._runtime, self._local_rank)
        observe_helpers(_find_failing_code)
        observe_own_ends(note_path(self._runtime, self._local_rank, OWN_END))
        super().start()

    def watch(self, module: Any) -> None:
        """Start to count."""
        try:
            self._count(module)
        except Exception:  # a bug here must never reach the program
            pass

    def _count(self, module: Any) -> None:
        from .mapped_files import keep_mapped_files
        from .steps import StepCounter

        counter_slots.announce(self._runtime, self._local_rank)
        observers: tuple[StepObserver, ...] = ()
        create_sampler: CreateSampler | None = None
        if ENV_RANK_FEATURES in os.environ:
            from .part import create_observers, find_sampler, load_parts

            worker = read_json(os.path.join(self._runtime, "workers", f"{self._local_rank}.json"))
            parts = load_parts(self._load_part)
            observers = create_observers(parts, worker, self._groups)
            create_sampler = find_sampler(parts)
        private = counter_slots.create_private_slot()

        def claim() -> Any | None:
            self._groups.note_step()
            keep_mapped_files(note_path(self._runtime, self._local_rank, MAPPINGS))
            # A check records every process that trains, not only the first one of a rank.
            return private if observers else counter_slots.claim_slot(self._runtime, self._local_rank)

        StepCounter(private, claim, observers, create_sampler).watch(module)


def _find_failing_code(error: BaseException) -> FailingCode:
    from .failing_code import find_failing_code

    return find_failing_code(error)
