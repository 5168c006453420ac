"""Build the rules of the spec that the kernel and features have in common.

The stored spec has defaults for ``nodes`` and ``suspend`` only: the operator must distinguish fields that the job sets
from fields that it leaves to its profile. A rule over several fields reads the unset ones with ``read_or_default``.
"""

from typing import Final

from ddp_operator.api.cel_rule import CelRule

YEAR: Final = 366 * 24 * 3600
"""A bound beyond any real job, in seconds."""


def require_between(at: str, least: int, most: int, remedy: str) -> CelRule:
    """Return the rule that the number at a node is within bounds."""
    return CelRule(at, f"self >= {least} && self <= {most}", f"must be between {least} and {most}; {remedy}")


def read_or_default(path: str, default: str | int | bool | list[str]) -> str:
    """Return CEL for the value of the member at ``path``, or ``default`` if the member is absent."""
    literal = str(default).lower() if isinstance(default, bool) else repr(default)
    return f"({is_set(path)} ? self.{path} : {literal})"


def is_set(path: str) -> str:
    """Return CEL that is true if the member at ``path``, and every object above it, is set."""
    parts = path.split(".")
    return " && ".join(f"has(self.{'.'.join(parts[:end])})" for end in range(1, len(parts) + 1))


def require(path: str, condition: str, message: str) -> CelRule:
    """Return the rule that the member at ``path`` requires a condition on other members. A profile may set those."""
    return CelRule("spec", f"!({is_set(path)}) || {condition}", message, field=f".{path}", if_complete=True)


def require_label_key(at: str) -> CelRule:
    """Return the rule that the text at a node is the key of a node label."""
    return CelRule(
        at,
        "self.matches('^([-A-Za-z0-9_.]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$')",
        "must be the key of a node label, such as topology.kubernetes.io/zone; change it",
    )


def require_object_name(at: str) -> CelRule:
    """Return the rule that the text at a node can be the name of an object that the template refers to."""
    return CelRule(
        at,
        "self.matches('^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$')",
        "must consist of lower-case letters, digits, '-' and '.'; change or remove it",
    )


def require_folder_url(at: str) -> CelRule:
    """Return the rule that the text at a node is the URL of a folder in a store."""
    return CelRule(
        at,
        "self.matches('^[a-z][a-z0-9+.-]*://[^ ]+$') && !self.matches('^(data|https?|memory)://')",
        "must be the URL of a writable folder, such as s3://bucket/prefix; change it",
    )
