"""Count the optimizer steps of Python processes that a rank's program starts, as ``bash train.sh`` does.

The shim of such a rank puts a folder with a ``sitecustomize.py`` first in PYTHONPATH. The first process whose optimizer
steps counts in the rank's slot. Interpreters that ignore PYTHONPATH (``python -E``, ``-I``) count nothing.
"""

import os
from typing import Any, Optional

from .. import counters
from ..files import BOOTSTRAP
from .import_hook import ImportHook

_OPTIMIZERS = "torch.optim.optimizer"
_SITECUSTOMIZE = """\
import sys
sys.path.remove({folder!r})
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # the environment's own one
except ImportError:
    sys.modules["sitecustomize"] = own
try:
    import importlib.util
    spec = importlib.util.spec_from_file_location("ddp_launcher_bootstrap", {bootstrap!r})
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    bootstrap.count_steps_of_child({runtime!r}, {local_rank!r})
except Exception:  # another Python: its steps stay invisible
    pass
"""


def set_python_path(runtime: str, local_rank: int) -> None:
    """Have the Python processes of the program that this rank becomes count their steps. Raises: OSError."""
    folder = os.path.join(runtime, "site", str(local_rank))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    text = _SITECUSTOMIZE.format(folder=folder, bootstrap=BOOTSTRAP, runtime=runtime, local_rank=local_rank)
    with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(text)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


class ChildHook(ImportHook):
    """Counts the steps of this process once it has imported PyTorch's optimizers."""

    def __init__(self, runtime: str, local_rank: int) -> None:
        super().__init__(_OPTIMIZERS)
        self._runtime = runtime
        self._local_rank = local_rank

    def watch(self, module: Any) -> None:
        """Start to count."""
        try:
            self._count(module)
        except Exception:  # a bug here must never reach the program
            pass

    def _count(self, module: Any) -> None:
        from .steps import StepCounter

        def claim() -> Optional[Any]:
            return counters.claim_slot(self._runtime, self._local_rank)

        counters.announce(self._runtime, self._local_rank)
        StepCounter(counters.create_private_slot(), claim).watch(module)
