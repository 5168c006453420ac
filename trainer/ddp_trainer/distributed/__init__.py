"""Ranks, process groups, DistributedDataParallel, and stopping all ranks after the same step."""

from dataclasses import dataclass

from ddp_trainer.config.options import Settings, option


@dataclass(frozen=True)
class DistributedConfig(Settings, group="distributed"):
    """Where the ranks compute and how they talk."""

    device: str = option(
        "auto",
        "cpu, cuda (a GPU for every process of a node), or auto (as cuda where torch sees any GPU, else cpu)",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = option("auto", "collectives: gloo, nccl, or auto (nccl on cuda)", choices=("auto", "gloo", "nccl"))
    timeout_seconds: float = option(
        600.0, "how long a collective may wait for a rank", flag="--collective-timeout-seconds", above=0
    )
    bucket_mb: float | None = option(
        None,
        "size of DDP's gradient buckets in MiB (default: DDP's own, 25 after a first one of 1; with compression 5, so "
        "that sending begins early)",
        above=0,
    )
    bucket_view: bool = option(True, "let gradients live in DDP's buckets, which saves a copy of them")
    static_graph: bool = option(False, "promise DDP that every step uses the same parameters (not with --accumulate)")
    find_unused_parameters: bool = option(
        False,
        "let DDP look in every step for parameters that the outputs don't depend on: slower, for models that have some",
    )
    broadcast_buffers: bool = option(
        False,
        "send rank 0's buffers to all ranks before every forward pass, as DDP does by itself: for models that read "
        "them in training",
    )
    compression: str = option(
        "none",
        "send gradients as bf16 or fp16, half the bytes, or as low-rank factors (powersgd, nccl only)",
        choices=("none", "bf16", "fp16", "powersgd"),
    )
    powersgd_rank: int = option(4, "rank of PowerSGD's factors", at_least=1)
