"""Writes docs/api.md from the resource's schema and rules: ``python -m docs.pages.api``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

from ddp_operator.api import constants
from ddp_operator.api.constants import EXIT_USER_ERROR
from ddp_operator.api.crd import SHORT_NAMES, build_resource_schema
from ddp_operator.api.job import CRASH_LOOP_FAILURES
from ddp_operator.api.rules import list_rules
from ddp_operator.api.spec import Recovery
from ddp_operator.api.structural import document_of
from ddp_operator.decide.hooks import Maturity
from ddp_operator.features import FEATURES, SCHEMA
from ddp_pod.contract.failure_table import (
    CATEGORIES,
    CUDA,
    IMAGE_PULL,
    NODE_FAULT,
    NODE_LOST,
    OOM,
    POD_DELETED,
    PREEMPTED,
    SIGNIFICANT_SECONDS,
)
from ddp_pod.failures.rules import AT_START
from docs.pages.limits import LIMITS

_REFERENCE: Final = "secretRef"
"""A reference with a name only. The page has one entry for both, with the meaning of the reference."""
_HEAD: Final = f"""\
# The resource `{constants.KIND}`

<!-- Generated from operator/ddp_operator/api by `make generate`. Do not edit. -->

A namespaced resource with `apiVersion: {constants.API_VERSION}` and the short names
{" and ".join(f"`{name}`" for name in SHORT_NAMES)}. `kubectl explain ddp.spec` prints these descriptions.

The API server refuses unknown fields, values out of range and combinations that cannot work; its message, and that of
`ddp render`, names the field and the remedy. The scale subresource is `spec.nodes`, for
`kubectl scale ddp/NAME --replicas=4` and a HorizontalPodAutoscaler.
"""


def write_page() -> str:
    """Return the page."""
    lines = [_HEAD, "## spec", "", *_SPEC_INTRODUCTION, ""]
    fields = list(_walk(document_of(SCHEMA.spec), "spec"))
    for maturity in get_args(Maturity):
        rows = [_describe_field(*entry) for entry in fields if _find_maturity(entry[0]) == maturity]
        if rows:
            lines += [f"### {maturity.capitalize()} fields", "", *_TABLE, *rows, ""]
    lines += ["### Deprecated fields", "", _DEPRECATED_INTRODUCTION, ""]
    lines += [*(f"- `spec.{field.path}`: {field.remedy}" for field in SCHEMA.former), ""]
    status = build_resource_schema(SCHEMA)["properties"]["status"]
    lines += ["## status", "", *_STATUS_INTRODUCTION, ""]
    written = [_describe_field(path, field, required=False) for path, field, _ in _walk(status, "status")]
    lines += [*_TABLE, *written, ""]
    lines += ["## When fields may change", "", f"{_find_immutability()}.", ""]
    lines += [*_write_limits(), "", *_write_restarts()]
    return "\n".join(lines) + "\n"


def _find_maturity(path: str) -> Maturity:
    """Return the maturity of a field: that of the feature that owns it; the kernel's own are stable."""
    for feature in FEATURES:
        owned = feature.fields.paths if feature.fields is not None else ()
        if any(path == root or path.startswith((f"{root}.", f"{root}[")) for root in owned):
            return feature.maturity
    return "stable"


def _write_limits() -> Iterator[str]:
    yield from ("## Limits that can end a job", "")
    yield from ("Each with its value, its result (a name: the reason of the condition `Failed`), and what sets it.", "")
    for limit in LIMITS:
        change = re.sub(r"spec\.[\w.]+", r"`\g<0>`", limit.change)
        what = re.sub(r"spec\.[\w.]+", r"`\g<0>`", limit.what)
        reason = f"`{limit.reason}`" if limit.reason.isalpha() else limit.reason
        result = f"; {reason}" if reason else ""
        yield f"- {what}: {limit.value}{result} ({change})"


def _find_immutability() -> str:
    """Return the rule that names the fields which cannot be changed, and when."""
    (message,) = (rule.message for rule in list_rules(SCHEMA) if "once the job has started" in rule.message)
    return f"Of `spec`, {message}"


def _write_restarts() -> Iterator[str]:
    yield from ("## Restarts", "", *_RESTARTS_INTRODUCTION, "")
    yield from ("| failure | restart in the same pods | restart with new pods | job fails |", "|---|---|---|---|")
    yield from (f"| {' | '.join(cells)} |" for cells in _list_retries())


_TABLE: Final = ("| field | type, default | meaning |", "|---|---|---|")
_SPEC_INTRODUCTION: Final = (
    "What you write; a *choice* is one of the named values. Stable and beta fields change by the [promises of a",
    "release](releases.md), experimental ones in each minor version.",
)
_DEPRECATED_INTRODUCTION: Final = "They work until 0.4. The commands name what to write."
_STATUS_INTRODUCTION: Final = (
    "What the operator writes. Unknown values are omitted. Numbers with a fraction are strings; times are in UTC.",
)
_RESTARTS_INTRODUCTION = (
    "If that can help, all workers restart in the same pods; the job keeps its nodes and its admission by a queue.",
    "Otherwise the operator starts a new attempt: a Job with new pods. Both count against `recovery.maxRestarts` (by",
    "default 0 under `ddp run`). *Limits* in the table:",
    f"{CRASH_LOOP_FAILURES} failures in a row without progress, or more than `maxRestarts`.",
    "",
    "Progress is a step beyond the highest step so far, from any [source](your-script.md). If the script reports",
    f"no steps, {SIGNIFICANT_SECONDS:g} seconds of running are progress, unless the same failure recurs after the same",
    "time. See also the [categories and remedies](troubleshooting.md#it-fails) and the",
    "[exit codes](pod-contract.md#exit-codes-of-the-launcher).",
    "",
    "A mistake ends the job at its first occurrence, whatever steps were made. An exception of a rank is one unless",
    "something outside took part, anywhere in its chain (also if `from None` replaces it): an error of the system, a",
    "service, a peer, a device, memory, a process, a wait or a number that is not finite; a value that comes from a",
    "network, process or peer; or a check by the script of files, the machine, the time or random numbers. An error",
    "about a path or file is one only on a local disk where nobody has written since its rank started (a missing path",
    "only in the root folder or a read-only volume).",
    "Ranks that call different collectives, or leave the loop before their",
    f"peers, within {SIGNIFICANT_SECONDS:g} seconds of the start do so again. To be restarted anyway, a script exits",
    "with code 82.",
)


def _list_retries() -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows: the failure, when it leads to a restart of each kind, and when it ends the job."""
    recovery = Recovery()
    codes = ", ".join(map(str, (EXIT_USER_ERROR, *recovery.non_retryable_exit_codes)))
    yield (
        f"mistakes that every attempt repeats, such as {', '.join(AT_START)}; exit codes {codes}",
        "no",
        "no",
        "at once",
    )

    not_counted = (PREEMPTED, POD_DELETED, NODE_LOST)
    of_nodes = (CUDA, NODE_FAULT)
    counted = [category for category in CATEGORIES.values() if category not in (*not_counted, *of_nodes, IMAGE_PULL)]
    limits = "limits"
    repeated = "the same twice without progress, or limits"
    second = "if no step was made since the last restart"
    script = ", ".join(f"`{category.name}`" for category in counted if category.own)
    yield script, "first", second, repeated
    yield "a rank that waits for no peer in the same line (`Hang`)", "first", second, repeated
    outside = ", ".join(f"`{category.name}`" for category in counted if not category.own)
    yield outside, "first", second, limits

    yield f"`{CUDA.name}`, `{OOM.name}` if the kernel killed the rank", "no", "first", limits
    yield f"`{NODE_FAULT.name}`", "no", "first, on other nodes", repeated
    yield "a probe or hook for which the kubelet killed the training container", "no", "first", repeated
    yield "a killed pod or launcher", "no", "first", limits
    yield ", ".join(f"`{category.name}`" for category in not_counted), "no", "always, not counted", "never"
    yield f"`{IMAGE_PULL.name}`", "no", "the kubelet retries", "after `pendingDeadlineSeconds`"


def _walk(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield every field with its path, its schema, and whether it is required."""
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        if name == _REFERENCE:
            yield f"{below}.name", field, False
            continue
        yield below, field, name in schema.get("required", ())
        yield from _walk(field, below)
        if "properties" in field.get("items", {}):
            yield from _walk(field["items"], f"{below}[]")


def _describe_field(path: str, schema: Mapping[str, Any], required: bool) -> str:
    kind = _type(schema)
    if required:
        kind += ", required"
    elif "default" in schema and schema.get("type") != "object":
        kind += f", `{json.dumps(schema['default'])}`"
    text = _format_text(schema.get("description", "")).replace("|", "\\|")
    return f"| `{path}` | {kind} | {text} |"


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        explained = all(f"{choice}:" in schema.get("description", "") for choice in schema["enum"])
        return "choice" if explained else ", ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if schema.get("type") == "array":
        items = _type(schema["items"])
        return "list" if items in ("object", "choice") else f"list of {items}"
    return "time" if schema.get("format") == "date-time" else str(schema.get("type", "object"))


def _format_text(text: str) -> str:
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", " ".join(text.split()).replace("<", "&lt;"))


if __name__ == "__main__":
    sys.stdout.write(write_page())
