"""The CRD's CEL rules, evaluated without an API server (``ddp render``, ``ddp run``). Needs cel-python."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import celpy
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

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
        bindings = {"self": node} | ({"oldSelf": _lookup(old, rule.at)} if rule.is_transition else {})
        try:
            holds = _program(rule).evaluate(
                {name: json_to_cel(_visible(rule, value)) for name, value in bindings.items()}
            )
        except ValueError:  # a number beyond 64 bits: its own field's rule refuses it
            holds = isinstance(node, Mapping)
        except CELEvalError:  # the API server takes a rule that cannot be evaluated for one that does not hold
            holds = False
        if not holds:
            # As the API server: it shows the value of the node that carries the rule, and leaves objects out.
            errors.append(FieldError(f"{rule.at}{rule.field}".lstrip("."), rule.message, node))
    return errors


def _visible(rule: Rule, value: Any) -> Any:
    """Return what a rule may look at. A template may hold numbers that CEL has no type for."""
    if rule.is_transition or not isinstance(value, Mapping):
        return value
    if "metadata" in value:
        return {"metadata": {"name": value["metadata"]["name"]}}
    return {name: member for name, member in value.items() if name != "template"}


@cache
def _program(rule: Rule) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule.cel))


def _lookup(value: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        if not isinstance(value, Mapping) or name not in value:
            return _ABSENT
        value = value[name]
    return value
