"""The CRD's CEL rules, evaluated without an API server (``ddp render``, ``ddp run``). Needs cel-expr-python.

That is CEL's own C++ evaluator: an evaluator in Python took longer to import than the rest of ``ddp run``'s checks.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from ddp_operator.api.errors import FieldError
from ddp_operator.api.rules import RULES, Rule

_ABSENT = object()


def check_rules(resource: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[FieldError]:
    """Return what ``kubectl apply`` would refuse by CEL.

    ``resource`` must carry its defaults already, as it does when the API server evaluates a rule. Transition rules are
    evaluated only when ``old``, the stored object, is given.
    """
    errors = []
    for rule in RULES:
        node = _lookup(resource, rule.at)
        if node is _ABSENT or (rule.is_transition and (old is None or _lookup(old, rule.at) is _ABSENT)):
            continue
        bindings = {"self": _visible(rule, node)}
        if rule.is_transition:
            bindings["oldSelf"] = _visible(rule, _lookup(old, rule.at))
        if not _fits(bindings):  # its own field's rule refuses it
            holds = isinstance(node, Mapping)
        else:  # the API server takes a rule that cannot be evaluated for one that does not hold
            holds = _program(rule.cel).eval(data=bindings).value() is True
        if not holds:
            # As the API server: it shows the value of the node that carries the rule, and leaves objects out.
            message = _program(rule.explanation).eval(data=bindings).value() if rule.explanation else rule.message
            errors.append(FieldError(f"{rule.at}{rule.field}".lstrip("."), message, node))
    return errors


def _visible(rule: Rule, value: Any) -> Any:
    """Return what a rule may look at. A template may hold numbers that CEL has no type for."""
    if rule.is_transition or not isinstance(value, Mapping):
        return value
    if "metadata" in value:
        return {"metadata": {"name": value["metadata"]["name"]}}
    return {name: member for name, member in value.items() if name != "template"}


def _fits(value: Any) -> bool:
    """Return whether every number is one that CEL has a type for: integers have 64 bits."""
    if isinstance(value, Mapping):
        return all(_fits(member) for member in value.values())
    if isinstance(value, list | tuple):
        return all(_fits(member) for member in value)
    return not isinstance(value, int) or -(2**63) <= value < 2**63


@cache
def _environment() -> Any:
    variables = {"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}
    return cel.NewEnv(variables=variables, extensions=[ext_strings.ExtStrings()])


@cache
def _program(text: str) -> Any:
    return _environment().compile(text)


def _lookup(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value
