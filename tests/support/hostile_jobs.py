"""Jobs of one tenant at the limits of size, all of them different, none with a pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ddp_operator.api.other_kinds import PROFILE_KIND
from tests.support.builders import Json, profile, template, trainer
from tests.support.limit_specs import ARGUMENT

ATTACKER: Final = "attacker"
"""The namespace of these jobs."""
OWN_ANNOTATION: Final = "ddp-operator.dev/touched"
"""An annotation that the operator keeps, so that each change causes a pass."""
NESTED: Final = "$nested"
"""For ``StandIn.insert``: sent as NESTED_LISTS."""
NESTED_LISTS: Final = b"[" + b",".join([b"[" * 200 + b"]" * 200] * 3500) + b"]"
"""1.4 MB."""

_FRAGMENTS: Final = ("{ ", "\n", "(", "env A=1 ", "if a\nthen ")
"""The parts of a script that take longest to read."""
_VALUES: Final = 200

BuildSpec = Callable[[int], Json]
"""Returns the spec of a job by its number."""


def build_script(number: int, size: int = 16 << 10) -> Json:
    """Return the spec of a suspended job with a long script."""
    fragment = _FRAGMENTS[number % len(_FRAGMENTS)]
    script = f"# {number}\n" + fragment * ((size - 20) // len(fragment))
    return {"suspend": True, "template": template(trainer(command=["env", "A=1", "bash", "-c", script]))}


def build_longest_script(number: int) -> Json:
    """Return the spec of a suspended job with the longest script that Linux starts."""
    return build_script(number, ARGUMENT)


def build_variables(number: int) -> Json:
    """Return the spec of a suspended job with as many variables as a spec may have."""
    variables = [{"name": f"V{index}", "value": f"{number}"} for index in range(3200)]
    return {"suspend": True, "template": template(trainer(env=variables))}


def build_nested(number: int) -> Json:
    """Return the spec of a suspended job with nested lists."""
    return {"suspend": True, "template": {"spec": {"containers": [trainer()], "a": NESTED}}}


def build_profiled(number: int) -> Json:
    """Return the spec of a suspended job that changes all values of its profile."""
    variables = [{"name": f"V{index}", "value": f"{number + 1}"} for index in range(_VALUES)]
    own = template(trainer(env=variables))
    return {"suspend": True, "template": own, "profileRef": {"name": "hostile", "kind": PROFILE_KIND}}


def build_hostile_profile() -> Json:
    """Return the profile of these jobs, which takes long to merge."""
    variables = [{"name": f"V{index}", "value": "0"} for index in range(_VALUES)]
    job = {"template": template(trainer(env=variables, image=None, command=None))}
    made = profile(job, name="hostile", kind=PROFILE_KIND)
    made["metadata"]["namespace"] = ATTACKER
    return made
