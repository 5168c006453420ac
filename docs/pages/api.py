"""Writes docs/api.md from the resource's schema and rules: ``python -m docs.pages.api``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ddp_operator import constants
from ddp_operator.api.crd import build_crd, build_resource_schema, build_schema
from ddp_operator.api.job import CRASH_LOOP_FAILURES
from ddp_operator.api.rules import RULES
from ddp_operator.api.spec import Recovery, Spec
from ddp_operator.constants import EXIT_USER_ERROR
from ddp_operator.contract.failure_table import (
    CATEGORIES,
    CUDA,
    IMAGE_PULL,
    NODE_LOST,
    OOM,
    PREEMPTED,
    SIGNIFICANT_SECONDS,
)
from ddp_operator.launcher.failures.rules import AT_START
from docs.pages.failures import list_categories, list_exit_codes
from docs.pages.limits import LIMITS

_HEAD: Final = f"""\
# The resource `{constants.KIND}`

<!-- Generated from operator/ddp_operator/api by `make generate`. Do not edit. -->

`apiVersion: {constants.API_VERSION}`, in a namespace; for kubectl also {" and ".join(constants.SHORT_NAMES)}.
`kubectl explain ddp.spec` says the same in a cluster. A field that is not here is refused, by name. Numbers with a
fraction are strings in `status`, and times are RFC 3339 in UTC, as in all of Kubernetes' own resources.

The scale subresource is `spec.nodes`: `kubectl scale ddp/NAME --replicas=4` and a HorizontalPodAutoscaler work on it.
"""


def write_page() -> str:
    """Return the page."""
    properties = build_resource_schema()["properties"] | {"spec": build_schema(Spec)}
    lines = [_HEAD]
    for part, title in (("spec", "What you write"), ("status", "What the operator writes")):
        lines += [f"## {part}", "", f"{title}.", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(*entry) for entry in _walk(properties[part], part)]
        lines.append("")
    lines += ["## Rules", "", "Beyond types and choices; `kubectl apply` and `ddp render` refuse in these words.", ""]
    lines += ["| where | refusal |", "|---|---|"]
    for rule in RULES:
        where = (rule.at + rule.field).strip(".")
        lines.append(f"| `{where}` | {_cell(rule.message)} |")
    lines += ["", "## Columns of `kubectl get ddp`", "", "| column | field |", "|---|---|"]
    for column in build_crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        wide = " (`-o wide`)" if column.get("priority") else ""
        lines.append(f"| {column['name'].upper()}{wide} | `{column['jsonPath'].strip('.')}` |")
    lines += ["", *_write_limits(), "", *_write_failures()]
    return "\n".join(lines) + "\n"


def _write_limits() -> Iterator[str]:
    yield from ("## Limits that can end a job", "")
    yield from ("What follows is the reason of the condition Failed, or as it says.", "")
    yield from ("| limit | value | what follows | where to change it |", "|---|---|---|---|")
    for limit in LIMITS:
        change = re.sub(r"spec\.[\w.]+", r"`\g<0>`", limit.change)
        what = re.sub(r"spec\.[\w.]+", r"`\g<0>`", limit.what)
        reason = f"`{limit.reason}`" if limit.reason.isalpha() else limit.reason
        yield f"| {what} | {limit.value} | {reason} | {change} |"


def _write_failures() -> Iterator[str]:
    yield from (
        "## Failures",
        "",
        "`status.lastFailure.category`. The root cause is the earliest failure that is not secondary. A symptom is",
        "what a rank reports after losing a peer: an earlier loss of a pod or a node explains it.",
        "Only a failure of the script's own ends the job when it repeats without progress.",
        "",
    )
    yield from list_categories()
    yield from ("", "A training pod ends with one of these exit codes, which a script may use too:", "")
    yield from list_exit_codes()
    yield from ("", "## What is retried", "", *_RETRIED_INTRODUCTION, "")
    yield from ("| what failed | in the same pods | with new pods | ends the job |", "|---|---|---|---|")
    yield from (f"| {' | '.join(cells)} |" for cells in _list_retries())


_RETRIED_INTRODUCTION = (
    "A failure is answered in the same pods where that can help: their agents start all workers again, at once, and",
    "meet at pod 0. The Job stays, with its place in a queue and its nodes. It is answered by a new attempt, a Job",
    "with new pods, where the pods may be the cause. Both count towards `recovery.maxRestarts`, and",
    "`status.lastRestart.level` says which it was. Each time one line tells so, in an Event, and of a new attempt in",
    "the condition `Restarting` and on the screen of `ddp run`: `restart 2 of 3: UserError (rank 1): KeyError: 10;",
    "from step 400`, where the step is that of the newest checkpoint that is known. `ddp run` retries only what the",
    "file or `--max-restarts` asks for.",
    "A step beyond the farthest one is progress, from whatever [source](your-script.md). Of a script that shows none,",
    f"so are {SIGNIFICANT_SECONDS:g} seconds, unless the same failure comes after the same time again.",
)


def _list_retries() -> Iterator[tuple[str, str, str, str]]:
    """Yield what failed, how often it is retried on which level, and what ends the job."""
    recovery = Recovery()
    free = (PREEMPTED, NODE_LOST)
    codes = ", ".join(map(str, (EXIT_USER_ERROR, *recovery.non_retryable_exit_codes)))
    yield f"a script that cannot start: {', '.join(AT_START)}; exit codes {codes}", "no", "no", "at once"
    counted = [one for one in CATEGORIES.values() if one not in (*free, IMAGE_PULL)]
    row = f"{CRASH_LOOP_FAILURES} in a row without progress, or more than `maxRestarts` since progress was saved"
    for own, more in ((True, "the same failure twice without progress; "), (False, "")):
        names = ", ".join(f"`{one.name}`" for one in counted if one.own == own and one is not CUDA)
        yield names, "first", "without a step since the last restart", more + row
    yield f"`{CUDA.name}`, `{OOM.name}` where the kernel has killed the rank", "no", "first", row
    yield "a pod or its launcher that was killed", "no", "first", row
    yield ", ".join(f"`{one.name}`" for one in free), "no", "each time, not counted", "never"
    yield f"`{IMAGE_PULL.name}`", "no", "the kubelet goes on trying", "`pendingDeadlineSeconds`"


def _walk(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield every field with its schema, and whether it must be given."""
    for name, field in schema.get("properties", {}).items():
        below = f"{path}.{name}"
        yield below, field, name in schema.get("required", ())
        yield from _walk(field, below)
        if "properties" in field.get("items", {}):
            yield from _walk(field["items"], f"{below}[]")


def _row(path: str, schema: Mapping[str, Any], required: bool) -> str:
    default = "required" if required else ""
    if "default" in schema and schema.get("type") != "object":
        default = f"`{json.dumps(schema['default'])}`"
    return f"| `{path}` | {_type(schema)} | {default} | {_cell(schema.get('description', ''))} |"


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    kind = str(schema.get("type", "object"))
    return f"{kind} ({schema['format']})" if "format" in schema else kind


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(write_page())
