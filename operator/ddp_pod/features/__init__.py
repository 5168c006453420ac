"""The features of the launcher. Each is a folder here and a line of the tuple; the packages below know none of them.

A feature takes part by modules with fixed names, which are loaded only where it has something to do: every process of
a pod compiles what it imports, and an archive may lack a feature that its job does not use.

- ``launcher``: ``PART``, a ``base.launcher_part.LauncherPart``, in the pod's first process;
- ``agent``: ``PART``, a ``torchrun.part.AgentPart``, in torchrun's agent;
- ``rank``: ``PART``, a ``rank.part.RankPart``, in each rank and the Python processes that it starts.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..contract.names import CHECK_VARIABLE, ENV_TRACKING_RUN

if TYPE_CHECKING:
    from ..base.launcher_part import LauncherPart
    from ..base.pod import Pod
    from ..rank.part import RankPart
    from ..torchrun.part import AgentPart


def _is_used_always(pod: "Pod") -> bool:
    return True


class Feature(NamedTuple):
    """A capability that can be deleted with its folder. ``page``: of docs/; ``modules``: those that it has.

    ``is_used``: whether it has something to do in a pod; ``rank_variable``: the environment variable that asks for
    its part in a rank; empty: ``is_used`` decides.
    """

    name: str
    maturity: str
    page: str
    modules: Sequence[str]
    is_used: Callable[["Pod"], bool] = _is_used_always
    rank_variable: str = ""


def _has_sampled_ranks(pod: "Pod") -> bool:
    return pod.auto_instrument and (pod.is_multi_node or pod.nproc_per_node > 1)


FEATURES: Final = (
    # Before replicas, whose findings replace its own.
    Feature("watchdog", "stable", "pod-contract.md", ("launcher", "agent")),
    Feature("check", "beta", "check.md", ("rank",), rank_variable=CHECK_VARIABLE),
    Feature("code", "stable", "your-code.md", ("launcher",), lambda pod: pod.code is not None),
    Feature("dev", "beta", "dev.md", ("launcher",), lambda pod: pod.dev is not None),
    Feature("history", "beta", "monitoring.md", ()),
    Feature("inputs", "stable", "your-code.md", ()),
    Feature("lost_nodes", "beta", "lost-nodes.md", ("launcher",), lambda pod: pod.is_multi_node and not pod.local),
    Feature("machine", "beta", "troubleshooting.md", ("launcher",)),
    Feature("memory", "beta", "checkpoints.md", ("launcher", "agent")),  # before mirror, which uploads what it saves
    Feature("mirror", "stable", "checkpoints.md", ("launcher", "agent"), lambda pod: pod.checkpoint is not None),
    # The folder of a run on a laptop has the same.
    Feature("points", "beta", "ui.md", ("launcher",), lambda pod: pod.node == 0 and not pod.local),
    Feature("preflight", "beta", "api.md", ("launcher", "agent"), lambda pod: pod.preflight is not None),
    Feature("replicas", "beta", "troubleshooting.md", ("launcher", "agent", "rank"), _has_sampled_ranks),
    Feature("tracking", "beta", "monitoring.md", ("launcher", "rank"), rank_variable=ENV_TRACKING_RUN),
    Feature("unreachable", "stable", "troubleshooting.md", ("launcher",), lambda pod: pod.is_multi_node),
)
"""Those without modules have subcommands only: see ``bootstrap``."""


def load_launcher_parts(pod: "Pod") -> "list[LauncherPart]":
    """Return the parts in the pod's first process."""
    return [_load(feature.name, "launcher") for feature in _list_used(pod, "launcher")]


def load_agent_parts(pod: "Pod") -> "list[AgentPart]":
    """Return the parts in torchrun's agent."""
    return [_load(feature.name, "agent") for feature in _list_used(pod, "agent")]


def list_rank_features(pod: "Pod") -> list[str]:
    """Return the features with a part in a pod's ranks, by its environment."""
    return [feature.name for feature in _list_used(pod, "rank")]


def load_rank_part(name: str) -> "RankPart":
    """Return a feature's part in a rank. Raises: ValueError for a name that is none; ImportError without its code."""
    if all(feature.name != name for feature in FEATURES):
        raise ValueError(f"there is no feature {name!r}")
    part: RankPart = _load(name, "rank")
    return part


def import_modules(module: str, pod: "Pod") -> None:
    """Import a module of all features that a pod uses: before a fork, or each process would compile them again.

    A fault of one is reported by the process that needs it.
    """
    for feature in _list_used(pod, module):
        with suppress(Exception):
            _load(feature.name, module)


def _list_used(pod: "Pod", module: str) -> list[Feature]:
    return [feature for feature in FEATURES if module in feature.modules and _is_used(feature, module, pod)]


def _is_used(feature: Feature, module: str, pod: "Pod") -> bool:
    if module == "rank" and feature.rank_variable:
        return bool(os.environ.get(feature.rank_variable))
    return feature.is_used(pod)


def _load(name: str, module: str) -> Any:
    return importlib.import_module(f".{name}.{module}", __package__).PART
