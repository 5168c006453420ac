"""The preflight in torchrun's agent, which knows the ranks of the round."""

import importlib

from ...base.pod import Pod
from ...torchrun.part import AgentPart, JoinedRound
from .checks import PreflightDone, PreflightError, find_fatal, run_preflight


class PreflightChecks(AgentPart):
    """Checks the network when all pods have joined for the first time."""

    name = "preflight"

    def is_vital(self, pod: Pod) -> bool:
        """Return whether the checks decide about the pod."""
        plan = pod.preflight
        return plan is not None and (plan.fail or plan.require)

    def prepare_round(self, pod: Pod, current: JoinedRound) -> bool:
        """Run the checks. Raises: PreflightError."""
        plan = pod.preflight
        if plan is None or current.number != 0:
            return True
        report = run_preflight(importlib.import_module("torch"), pod, plan, current.ranks)
        current.report(PreflightDone(report))
        fatal = find_fatal(report, plan)
        if fatal:
            raise PreflightError(fatal, report)
        return True


PART = PreflightChecks()
