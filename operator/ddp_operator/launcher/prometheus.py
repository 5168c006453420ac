"""Pages in Prometheus' text format: merged, and read."""

from __future__ import annotations

import math
import re
from typing import Iterable

from .contract import METRIC_STEP_SECONDS

_PROGRESS_LIMIT = 30
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^\n]*\})?[ \t]+(\S+)([ \t]+-?\d+)?[ \t]*")
_HEADER = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?: (.*))?")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


def merge_pages(pages: Iterable[str]) -> str:
    """Merge Prometheus pages: one HELP and TYPE a name, the first of equal series, no line that is neither."""
    families: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    seen: set[str] = set()
    for number, page in enumerate(pages):
        for line in page.splitlines():
            header = _HEADER.fullmatch(line)
            if header:
                word, name, text = header[1], header[2], header[3] or ""
                families.setdefault(name, {}).setdefault(word, text)
                continue
            sample = _SAMPLE.fullmatch(line)
            if not sample or not is_number(sample[3]) or (number and sample[1].startswith("ddp_launcher_")):
                continue
            series = sample[1] + (sample[2] or "")
            if series in seen:
                continue
            seen.add(series)
            samples.setdefault(_family_of(sample[1], families), []).append(line)
    lines: list[str] = []
    for name, rows in samples.items():
        about = families.get(name, {})
        lines += [f"# {word} {name} {about[word]}" for word in ("HELP", "TYPE") if word in about]
        lines += rows
    return "\n".join(lines) + "\n"


def _family_of(sample: str, families: dict[str, dict[str, str]]) -> str:
    if sample in families:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and sample[: -len(suffix)] in families:
            return sample[: -len(suffix)]
    return sample


def is_number(text: str) -> bool:
    """Tell whether a sample's value is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_progress(page: str) -> dict[str, float]:
    """Return the gauges and counters that have no label but ``rank``, and the time spent in steps."""
    kinds = {match[2]: match[3] for match in map(_HEADER.fullmatch, page.splitlines()) if match and match[1] == "TYPE"}
    found: dict[str, float] = {}
    for line in page.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if not sample or not is_number(sample[3]) or not math.isfinite(float(sample[3])):
            continue
        plain = not sample[2] or re.fullmatch(r'\{rank="[^"]*",?\}', sample[2])
        kind = kinds.get(sample[1]) or kinds.get(_family_of(sample[1], {name: {} for name in kinds}))
        shown = kind in ("gauge", "counter") or sample[1] == METRIC_STEP_SECONDS
        known = sample[1].startswith("ddp_") and len(sample[1]) < 64 and shown
        if plain and known and len(found) < _PROGRESS_LIMIT:
            found[sample[1]] = float(sample[3])
    return found
