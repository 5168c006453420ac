"""Specs at the limits of size: each place of a full manifest with as much as a spec may have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from ddp_operator.api.size import MAX_BYTES, MAX_VALUES
from tests.support.builders import Json, template, trainer
from tests.support.strategies import FULL, RICH, mutate, places

BYTES = MAX_BYTES - 16_384
ARGUMENT = 131_000  # bytes; Linux starts no program with a longer one
SCRIPT = 16_000
VALUES = MAX_VALUES - 500
FURTHER: Json = {
    "code": {"digest": "0" * 64, "source": "configmap/code", "mountPath": "/code", "pip": "r.txt"},
    "inputs": [
        {"name": "a", "url": "https://a/b", "mountPath": "/in", "claimName": "c", "checksum": f"sha256:{0:064}"}
    ],
    "scheduling": {"gang": "Volcano", "queue": "q"},
    "networkPolicy": {
        "enabled": True,
        "egressCidrs": ["10.0.0.0/8"],
        "metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    },
}
FRAGMENTS = (
    *("\n", ";", "(", " ", "a=b ", "/", "-", "'a' ", '"', "\\\n", "$(", "`", "<<E\n", "#\n", "{ ", "if a\nthen "),
    *(
        "torchrun --a ",
        "env A=1 ",
        "python -m ",
        "exec ",
        "bash -c ",
        "sudo -u ",
        "://a:",
        "1",
        "[",
        "[a]",
        ".a",
        "é",
        "*a",
    ),
)
"""Repeated texts. Each starts what some scanner follows: a command, a quotation, a flag, a URL, a number, a pattern."""
WORDS = (["-u"], ["-m"], ["--a=1"], ["A=1"], ["env"], ["--tee", "3"], ["x"], ["-r"], [""], ["'"])
STARTS = (["python"], ["torchrun"], ["env"], ["bash", "-c"], ["bash"], ["accelerate", "launch"], ["numactl"], ["a"])


def list_lines() -> Iterator[tuple[str, Json]]:
    """Yield specs with a long command, and their descriptions."""
    for fragment in FRAGMENTS:
        text = _repeat(fragment)
        for size in (SCRIPT, ARGUMENT):
            argument = fragment * (size // len(fragment.encode()))
            yield f"bash -c {fragment!r}… ({size})", _build(command=["bash", "-c", argument])
            yield (
                f"env bash -c {fragment!r}… ({size})",
                _build(command=["env", "A=1", "bash", "-lc", f"{argument[:-99]}\ntorchrun x.py"]),
            )
        yield f"variable {fragment!r}…", _build(env=[{"name": "DDP_X", "value": text}, {"name": "A", "value": 1}])
        yield f"mount {fragment!r}…", _build(volumeMounts=[{"name": text, "mountPath": "/x"}])
    for start in STARTS:
        for words in WORDS:
            line = [*start, *islice(cycle(words), VALUES)]
            yield f"{start} {words}…", _build(command=line)
    yield "one group of short flags", _build(command=["torchrun", "-" + "m" * ARGUMENT, "x.py"])


def list_specs() -> Iterator[tuple[str, Json]]:
    """Yield specs with a place at the limits, and their descriptions."""
    yield from list_lines()
    for fragment in FRAGMENTS:
        for path in places(_full()):
            if isinstance(_read(_full(), path), str):
                yield f"{path}: {fragment!r}…", mutate(_full(), path, _repeat(fragment), "replace")
    for path in places(_full()):
        value = _read(_full(), path)
        if isinstance(value, list) and value:
            count = VALUES // (1 + len(str(value[0])) // 8)
            yield f"{path}: equal items", mutate(_full(), path, value[:1] * count, "replace")
            items = [_rename(value[0], number) for number in range(count)]
            yield f"{path}: different items", mutate(_full(), path, items, "replace")
        elif isinstance(value, dict):
            members = {f"a{number}": "a" for number in range(VALUES)}
            yield f"{path}: further members", mutate(_full(), path, value | members, "replace")
            yield f"{path}: one long member", mutate(_full(), path, value | {"a" * BYTES: "a"}, "replace")


def _full() -> Json:
    full: Json = {**FULL["spec"], **FURTHER, "template": RICH}
    full["metrics"] = {"port": 9400, "logPatterns": ["step (?P<step>[0-9]+)"]}
    return full


def _repeat(fragment: str) -> str:
    """Return a text that takes the limit as JSON."""
    return fragment * (BYTES // (len(json.dumps(fragment)) - 2))


def _build(**container: Any) -> Json:
    return {"template": template(trainer(**container)), "nodes": 2, "procPerNode": 2}


def _read(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def _rename(item: Any, number: int) -> Any:
    return {**item, "name": f"a{number}"} if isinstance(item, dict) else f"{item}{number}"
