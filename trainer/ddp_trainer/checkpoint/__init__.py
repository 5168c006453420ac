"""Checkpoints: the store on disk, the folder's lock, and the fence between attempts."""

from dataclasses import dataclass

from ddp_trainer.options import SettingsGroup, option


@dataclass(frozen=True)
class CheckpointConfig(SettingsGroup, group="checkpoint"):
    """The folder, frequency and number of checkpoints."""

    dir: str | None = option(
        None, "folder for checkpoints (default: DDP_CHECKPOINT_DIR; none: no checkpoints)", flag="--checkpoint-dir"
    )
    every_epochs: int = option(
        1,
        "epochs between checkpoints; 0: save only at the end",
        flag="--checkpoint-every-epochs",
        only={"checkpoint.dir": ()},
        at_least=0,
    )
    every_steps: int = option(
        0,
        "steps between additional checkpoints; 0: none",
        flag="--checkpoint-every-steps",
        only={"checkpoint.dir": ()},
        at_least=0,
    )
    keep: int = option(
        3,
        "newest checkpoints to keep, in addition to the best by validation accuracy",
        flag="--checkpoint-keep",
        only={"checkpoint.dir": ()},
        at_least=1,
    )
