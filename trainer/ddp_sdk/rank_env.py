"""The ranks of this process. Only this module reads torchrun's environment variables."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_sdk.errors import UserError


@dataclass(frozen=True)
class RankEnv:
    """This process's ranks and world sizes, with torchrun's names."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "RankEnv":
        """Read torchrun's variables; without them, describe a single process.

        Raises :class:`UserError` if only some of them are set or one is not a number.
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
                    f"is {text!r} in the environment, not a number",
                    "start the script with torchrun, or unset RANK and WORLD_SIZE for one process",
                ) from None

        rank = number("RANK")
        world_size = number("WORLD_SIZE")
        if not (0 <= rank < world_size):
            raise UserError("RANK", f"{rank} does not fit WORLD_SIZE {world_size}", "start the script with torchrun")
        return cls(
            rank,
            number("LOCAL_RANK", 0),
            world_size,
            number("LOCAL_WORLD_SIZE", 1),
            number("TORCHELASTIC_RESTART_COUNT", 0),
        )

    @classmethod
    def from_group(cls, rank: int, hosts: Sequence[str], environ: Mapping[str, str] = os.environ) -> "RankEnv":
        """Describe ``rank`` of a process group whose ranks run on ``hosts``; torchrun's variables take precedence.

        Raises :class:`UserError` as :meth:`from_environ`.
        """
        host = hosts[rank]
        group = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
        }
        return cls.from_environ({**group, **environ})

    @classmethod
    def spawned(cls, local_rank: int, processes: int, *, node: int = 0, nodes: int = 1) -> "RankEnv":
        """Describe a process that ``torch.multiprocessing.spawn`` started, one of ``processes`` on each node."""
        return cls(node * processes + local_rank, local_rank, nodes * processes, processes)
