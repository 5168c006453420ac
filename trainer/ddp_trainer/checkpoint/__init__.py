"""Checkpoints: the store on disk, the copy that is written, and the fence between attempts."""

from dataclasses import dataclass

from ddp_trainer.config.options import Settings, option


@dataclass(frozen=True)
class CheckpointConfig(Settings, group="checkpoint"):
    """Where and how often the run is saved."""

    dir: str | None = option(
        None, "folder for checkpoints (default: DDP_CHECKPOINT_DIR; none: no checkpoints)", flag="--checkpoint-dir"
    )
    every_epochs: int = option(
        1, "save after every so many epochs; 0: only at the end", flag="--checkpoint-every-epochs", at_least=0
    )
    every_steps: int = option(
        0, "also save after every so many steps; 0: not", flag="--checkpoint-every-steps", at_least=0
    )
    keep: int = option(
        3,
        "how many of the newest to keep; the best by validation accuracy is kept besides",
        flag="--checkpoint-keep",
        at_least=1,
    )
    resume: str = option(
        "auto", "auto goes on from the newest good checkpoint; never wants an empty folder", choices=("auto", "never")
    )
