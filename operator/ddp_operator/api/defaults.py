"""Defaults of a job that depend on where it runs. docs/local.md lists them for users."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RestartDefaults:
    """Default of ``spec.recovery.maxRestarts``, by the place where the job runs."""

    cluster: int
    """In a cluster: the default in the CustomResourceDefinition."""
    local: int
    """In ``ddp run``: a mistake in the script ends the run at once."""

    @property
    def drill(self) -> int:
        """In ``ddp drill``: a drill measures a restart, so it restarts as a cluster does."""
        return self.cluster


MAX_RESTARTS: Final = RestartDefaults(cluster=3, local=0)
