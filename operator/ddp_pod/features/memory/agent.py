"""The copies in memory, in torchrun's agent."""

import os

from ...base.pod import Pod
from ...torchrun.part import AgentPart
from .copies import wait_for_copies


class CopiesInAgent(AgentPart):
    """Lets the ranks complete the copies that they are writing."""

    name = "memory"

    def prepare_stop(self, pod: Pod) -> None:
        """Wait for copies under way."""
        wait_for_copies(pod.node, os.environ)


PART = CopiesInAgent()
