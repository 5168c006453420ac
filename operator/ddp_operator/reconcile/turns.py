"""When the steps that read tenants' input (parse, check, build, decide) run.

The steps of a local run follow each other. The operator's process, whose event loop all tenants share, passes
``fair_turns.FairTurns`` instead.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Payer:
    """The namespace that is charged for a step, and the number of pods that the step reads."""

    namespace: str
    pods: int = 0


class Turns:
    """Runs each step at once."""

    async def run(self, payer: Payer, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a step once it is its turn. Raises: what the step raises, InvalidManifest if it is cut.

        ``payer``: who is charged for it.
        """
        return step(*args, **kwargs)

    def lend_worker(self) -> AbstractContextManager[None]:
        """Let another job be handled while the block waits for something that is not the API server."""
        return nullcontext()
