"""This process's place among the ranks: the only module that reads torchrun's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_trainer.errors import UserError


@dataclass(frozen=True)
class RankEnv:
    """This process's place among the ranks, in torchrun's words."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RankEnv:
        """Read torchrun's variables; without them this is one process of its own.

        Raises :class:`UserError` where only a part of them is set or one is not a number.
        """
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls()

        def number(name: str, default: int | None = None) -> int:
            text = environ.get(name)
            if text is None and default is not None:
                return default
            try:
                return int(text or "")
            except ValueError:
                raise UserError(
                    name,
                    f"is {text!r} in the environment",
                    "start the trainer with torchrun, or unset RANK and WORLD_SIZE for one process",
                ) from None

        rank, world_size = number("RANK"), number("WORLD_SIZE")
        if not (0 <= rank < world_size):
            raise UserError("RANK", f"{rank} does not fit WORLD_SIZE {world_size}", "start the trainer with torchrun")
        return cls(
            rank,
            number("LOCAL_RANK", 0),
            world_size,
            number("LOCAL_WORLD_SIZE", 1),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )
