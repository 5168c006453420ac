"""Ranks, process groups, DistributedDataParallel, and the agreement of all ranks to stop after the same step."""

from dataclasses import dataclass

from ddp_trainer.options import SettingsGroup, option


@dataclass(frozen=True)
class DistributedConfig(SettingsGroup, group="distributed"):
    """The device of the ranks, and how they communicate."""

    device: str = option(
        "auto",
        "cpu, cuda (a GPU for every process of a node), or auto (as cuda where torch sees any GPU, else cpu)",
        choices=("auto", "cpu", "cuda"),
    )
    timeout_seconds: float = option(
        600.0, "longest time that a collective waits for a rank", flag="--collective-timeout-seconds", above=0
    )
    find_unused_parameters: bool = option(
        False,
        "search in every step for parameters that the outputs don't depend on: slower, for models that have some",
    )
    data_parallel: bool = option(
        False,
        "one process for all GPUs of this node by torch.nn.DataParallel, which splits each batch: slower than DDP, "
        "for comparison",
    )
