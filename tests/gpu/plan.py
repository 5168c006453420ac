"""Which loops of the documents' systems are measured on one GPU, in which number formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.bench.trainer.systems import BY_NAME, System

SYSTEMS = tuple(
    BY_NAME[name]
    for name in (
        "cifar10-resnet18",
        "cifar10-resnet50",
        "cifar10-wideresnet",
        "voc2012-deeplabv3",
        "fashion-mnist-wideresnet",
        "fashion-mnist-wideresnet-large-batch",
    )
)
"""One for each preset, in order of value: DDP and DataParallel need two GPUs."""


class Loops(NamedTuple):
    """The names of loops that take turns. ``compiled``: ours with torch.compile, if it is measured."""

    documents: str
    ours: str
    compiled: str | None
    bare: str

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [name for name in self if name]


# The documents compute in fp32, with TF32 where torch uses it by default. Only one of them has a gradient scaler.
PRECISIONS: Mapping[str, Loops] = {
    "bf16": Loops("documents", "ours:preset", "ours:compile", "bare:compile"),
    "fp32": Loops("documents", "ours:fp32", None, "bare:fp32-compile"),
    "fp16": Loops("documents:fp16", "ours:fp16", None, "bare:fp16-compile"),
}
_COMPILED_ON_CPU = ("fashion-mnist-wideresnet", "bf16")
# Their steps need much memory, and the compilations of several systems run at the same time.
_LARGE = ("cifar10-wideresnet", "voc2012-deeplabv3")


def choose_loops(system: System, precision: str, device: str) -> Loops | None:
    """Return the loops to measure; None if the device lacks the format. A CPU compiles one step: it takes a minute."""
    if device == "cuda":
        return PRECISIONS[precision]
    if precision == "fp16":
        return None
    loops = PRECISIONS[precision]
    if (system.name, precision) == _COMPILED_ON_CPU:
        return loops
    return loops._replace(compiled=None, bare=loops.ours.replace("ours", "bare"))


def is_compiled_before(system: System, precision: str, device: str) -> bool:
    """Return whether the bare step is compiled while the tests run."""
    if device == "cpu":
        return (system.name, precision) == _COMPILED_ON_CPU
    return precision == "bf16" or system.name not in _LARGE
