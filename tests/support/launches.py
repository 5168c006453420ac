"""Count the launches that a GPU would receive, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = ("as_strided", "detach", "select", "slice", "unbind", "view")
# Allocations, and queries about tensors.
_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense")


class Launches(TorchDispatchMode):
    """Counts operations that launch kernels: no views, no allocations; a foreach of unequal shapes one by one.

    A fused or foreach operation counts as one, although torch cuts long lists. torch has no fused SGD for the device
    ``meta``; here it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        out = None if name.startswith("_fused_sgd") else func(*args, **(kwargs or {}))
        if name.startswith("_foreach"):
            lists = [arg for arg in args if isinstance(arg, list | tuple)]
            forms = [[(item.shape, item.stride()) for item in each] for each in lists if isinstance(each[0], Tensor)]
            self.count += len(lists[0]) if any(form != forms[0] for form in forms) else 1
        else:
            self.count += not (func.is_view or name in _VIEWS or name in _NOTHING)
        return out


def counted(function: Callable[[], object]) -> int:
    """The number of launches of ``function``."""
    launches = Launches()
    with launches:
        function()
    return launches.count
