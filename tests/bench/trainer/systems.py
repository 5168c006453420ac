"""The systems of the four documents behind the presets, their values, and ways to run the trainer on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class System:
    """One system of a document: a preset, and its distribution over processes.

    ``published`` maps a number of GPUs to the seconds that the document reports for it, ``seconds_of`` names the
    measured interval; ``claim`` is the document's sentence. ``label`` is its earlier name.
    """

    name: str
    label: str
    title: str
    preset: str
    mode: str  # "single", "dp" (DataParallel: one process, several GPUs) or "ddp"
    published: Mapping[int, float] = field(default_factory=dict)
    seconds_of: str = "an epoch"
    claim: str = ""
    # Number of ranks that the document's command starts; None: all that exist.
    ranks: int | None = None
    # Whether --quick runs it.
    quick: bool = False
    # Number format that the document's own loop uses.
    published_precision: str = "fp32"
    # Number of nodes of the ranks; here they are parts of this machine.
    nodes: int = 1
    # The document's report after its epochs, as a text.
    accuracy: str = ""
    # Batch sizes that the document compares.
    sweep: tuple[int, ...] = ()


SYSTEMS = (
    System("cifar10-resnet50", "S0a", "CIFAR-10, ResNet-50, one process", "cifar10-resnet50", "single", {1: 13.2},
           claim="one A100: 13.2 s an epoch, 69 s in all", quick=True, accuracy="about 27 % after one epoch"),
    System("cifar10-resnet50-dp", "S0b", "the same under DataParallel", "cifar10-resnet50", "dp", {4: 19.1},
           claim="four A100"),
    System("cifar10-resnet50-ddp", "S0c", "the same under DDP", "cifar10-resnet50", "ddp", {2: 9.8, 4: 6.1},
           claim="two and four A100"),
    System("cifar10-resnet50-ddp-fp16", "S0d", "the same, DDP with mixed precision", "cifar10-resnet50", "ddp",
           {4: 6.5}, claim="four A100", published_precision="fp16"),
    System("fashion-mnist-wideresnet", "S1a", "Fashion-MNIST, WideResNet", "fashion-mnist-wideresnet", "ddp",
           quick=True),
    System("fashion-mnist-wideresnet-large-batch", "S1b", "the same, large-batch recipe",
           "fashion-mnist-wideresnet-large-batch", "ddp", claim="throughput rises with the batch only to a point",
           sweep=(32, 64, 128, 256, 512)),
    System("cifar10-wideresnet", "S1c", "CIFAR-10, WideResNet, full augmentation", "cifar10-wideresnet", "ddp",
           quick=True),
    System("voc2012-deeplabv3", "S2a", "VOC 2012, DeepLabV3-ResNet101", "voc2012-deeplabv3-resnet101", "ddp",
           claim="4 x V100 three times one V100; 8 x V100 30 % more than four"),
    System("voc2012-deeplabv3-dp", "S2b", "the same under DataParallel", "voc2012-deeplabv3-resnet101", "dp",
           claim="nearly DDP's efficiency at eight V100"),
    System("cifar10-resnet18", "S3a", "CIFAR-10, ResNet-18, one process", "cifar10-resnet18", "single", {1: 2.44},
           "training", "one A10", ranks=1, quick=True),
    System("cifar10-resnet18-ddp", "S3b", "the same on two", "cifar10-resnet18", "ddp", {2: 1.23}, "training",
           "two A10", ranks=2, quick=True),
    System("cifar10-resnet18-ddp-4", "S3c", "the same on two nodes of two", "cifar10-resnet18", "ddp", {4: 1.15},
           "training", "two nodes of two A10", ranks=4, nodes=2),
)  # fmt: skip

# By name, and by label, which --systems also accepts.
BY_NAME: Mapping[str, System] = {key: system for system in SYSTEMS for key in (system.name, system.label)}
# Changes of --quick in a preset, so that a step takes well below a second on a CPU.
_WIDE = {"data": {"batch_size": 16}, "model": {"widen": 2}}
QUICK: Mapping[str, Mapping[str, Any]] = {
    "cifar10-resnet50": {"data": {"batch_size": 8}},
    "fashion-mnist-wideresnet": _WIDE,
    "fashion-mnist-wideresnet-large-batch": _WIDE,
    "cifar10-wideresnet": _WIDE,
    "voc2012-deeplabv3-resnet101": {
        "data": {"batch_size": 2, "image_size": 96},
        "model": {"name": "deeplabv3_resnet50"},
    },
    "cifar10-resnet18": {"data": {"batch_size": 32}},
}


# Variants on a GPU: the trainer's defaults, and on the main system all steps up to them.
ON_GPU = ("preset", "compile-graphs")
ON_GPU_IN_FULL = ("fp32", "bf16", "compile", "compile-graphs")

# Name of a variant -> its changes in a preset.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "preset": {},
    "fp32": {"precision": {"name": "fp32", "channels_last": False}},
    "bf16": {"precision": {"name": "bf16"}},
    "fp16": {"precision": {"name": "fp16"}},
    "compile": {"precision": {"name": "auto", "compile": True}},
    "fp32-compile": {"precision": {"name": "fp32", "channels_last": False, "compile": True}},
    "fp16-compile": {"precision": {"name": "fp16", "compile": True}},
    "compile-graphs": {"precision": {"name": "auto", "compile": True, "compile_mode": "reduce-overhead"}},
}


def changes_of(variant: str) -> Mapping[str, Any]:
    """The changes of a variant in a preset; ``batch-64`` is the preset with that batch."""
    size = variant.removeprefix("batch-")
    return VARIANTS[variant] if size == variant else {"data": {"batch_size": int(size)}}


@dataclass(frozen=True)
class BenchmarkCase:
    """One run to measure: a system on a number of ranks, or why it is not available here."""

    system: System
    ranks: int
    missing: str = ""


def plan_cases(
    systems: tuple[System, ...], device: str, available: int, ranks: tuple[int, ...] | None
) -> list[BenchmarkCase]:
    """The cases that fit ``available`` ranks (GPUs, or cores for CPU ranks). ``ranks`` limits the numbers tried.

    A system of one process runs on one rank, DataParallel on one rank that uses all GPUs, DDP on one, two, four
    GPUs and all; a system whose document fixes the number runs on that number.
    """
    unit = "GPU" if device == "cuda" else "core"
    gpus = available if device == "cuda" else 0
    usual = tuple(sorted({1, 2, *((4,) if gpus else ()), available} & set(range(1, available + 1))))
    cases = []
    for system in systems:
        expected = ranks or usual if system.mode == "ddp" and system.ranks is None else (system.ranks or 1,)
        for number in expected:
            missing = ""
            if system.mode == "dp" and gpus < 2:
                missing = f"DataParallel needs two GPUs, this machine has {gpus}"
            elif number > available:
                missing = f"needs {number} {unit}s, this machine has {available}"
            elif system.published_precision == "fp16" and not gpus:
                missing = "fp16 with a gradient scaler needs a GPU"
            cases.append(BenchmarkCase(system, number, missing))
    return cases


def each_preset_first(cases: list[BenchmarkCase]) -> list[BenchmarkCase]:
    """In the same order, but for each preset the first runnable case comes before all others."""
    first: dict[str, BenchmarkCase] = {}
    for case in cases:
        if not case.missing:
            first.setdefault(case.system.preset, case)
    return [*first.values(), *(case for case in cases if case not in first.values())]
