"""Evaluate the CRD's CEL rules without an API server (``ddp render``, ``ddp run``). Requires cel-expr-python.

cel-expr-python wraps the C++ evaluator of CEL. A pure Python evaluator took longer to import than all other checks of
``ddp run`` together.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from ddp_operator.api.cel_rule import CelRule
from ddp_operator.api.errors import FieldError
from ddp_operator.api.rules import list_rules
from ddp_operator.api.schema import Schema

_ABSENT = object()


def check_rules(resource: Mapping[str, Any], schema: Schema, old: Mapping[str, Any] | None = None) -> list[FieldError]:
    """Return the errors that ``kubectl apply`` would report for CEL rules.

    ``resource`` must have its defaults, as in an API server. Transition rules are evaluated only if ``old``, the
    stored object, is given.
    """
    errors = []
    for rule in list_rules(schema):
        node = _lookup(resource, rule.at)
        if node is _ABSENT:
            continue
        bindings = {"self": _select_readable(rule, node)}
        if rule.is_transition:
            old_node = _lookup(old, rule.at)
            if old is None or old_node is _ABSENT:
                continue
            bindings["oldSelf"] = _select_readable(rule, old_node)

        if _has_cel_numbers(bindings):
            # The API server treats a rule that fails to evaluate as a rule that does not hold.
            holds = _compile(rule.cel).eval(data=bindings).value() is True
        else:
            holds = isinstance(node, Mapping)  # the rule of the member with that number refuses it
        if not holds:
            message = _compile(rule.explanation).eval(data=bindings).value() if rule.explanation else rule.message
            errors.append(FieldError(f"{rule.at}{rule.field}".lstrip("."), message, node))
    return errors


def _select_readable(rule: CelRule, value: Any) -> Any:
    """Return the part of a value that a rule reads. A template may have numbers without a CEL type."""
    if rule.is_transition or not isinstance(value, Mapping):
        return value
    if "metadata" in value:
        return {"metadata": {"name": value["metadata"]["name"]}}
    return {name: member for name, member in value.items() if name != "template"}


def _has_cel_numbers(value: Any) -> bool:
    """Return whether CEL has a type for every number in a value: its integers have 64 bits."""
    if isinstance(value, Mapping):
        return all(_has_cel_numbers(member) for member in value.values())
    if isinstance(value, list | tuple):
        return all(_has_cel_numbers(member) for member in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


@cache
def _environment() -> Any:
    variables = {"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}
    return cel.NewEnv(variables=variables, extensions=[ext_strings.ExtStrings()])


@cache
def _compile(text: str) -> Any:
    return _environment().compile(text)


def _lookup(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value
