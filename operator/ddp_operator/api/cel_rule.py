"""A CEL rule of the spec."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CelRule:
    """One ``x-kubernetes-validations`` entry."""

    at: str
    cel: str
    message: str
    field: str = ""
    explanation: str = ""
    """CEL of a message that depends on values (``messageExpression``); used instead of ``message``."""
    if_complete: bool = False
    """True: the rule does not apply to a spec that a profile may still complete."""

    @property
    def is_transition(self) -> bool:
        """True if the rule compares with the stored object."""
        return "oldSelf" in self.cel
