"""Print the chart's ``Chart.yaml`` of a release: with the annotations of Artifact Hub that depend on the release.

``python -m charts.tooling.artifacthub --registry R [--repository URL] [--image NAME=DIGEST]…`` prints it; the release
build packages it. Source of the annotations: https://artifacthub.io/docs/topics/annotations/helm.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ddp_operator.api.documents import load_documents
from ddp_operator.api.yaml_writer import format_documents

ROOT: Final = Path(__file__).resolve().parents[2]
PLATFORMS: Final = ("linux/amd64", "linux/arm64")
CHANGES_PER_KIND: Final = 15
"""Helm stores the annotations in a Secret of at most 1 MiB with each release."""
SCREENSHOTS: Final = {
    "Report of a run": "docs/images/report.png",
    "Ranks in a report": "docs/images/report-ranks.png",
    "ddp watch": "docs/images/watch.svg",
}


class Change(NamedTuple):
    """An entry of the changelog: its kind (added, changed, fixed, …), and its text on one line."""

    kind: str
    description: str


def read_changes(changelog: str, version: str) -> list[Change]:
    """Return the entries of a version in a changelog in the form of Keep a Changelog. Raises: ValueError."""
    section = re.search(rf"(?ms)^## \[{re.escape(version)}\].*?(?=^## \[|\Z)", changelog)
    if section is None:
        raise ValueError(f"CHANGELOG.md has no section [{version}]; add it before the release")
    changes = []
    for part in re.split(r"(?m)^### ", section[0])[1:]:
        kind, _, text = part.partition("\n")
        for entry in re.findall(r"(?ms)^- (.*?)(?=^- |^\s*$|\Z)", text):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", entry)  # relative links lead nowhere on Artifact Hub
            changes.append(Change(kind.strip().lower(), " ".join(plain.split())))
    return changes


def build_metadata(
    chart: Mapping[str, Any], changes: list[Change], registry: str, digests: Mapping[str, str], repository: str
) -> dict[str, Any]:
    """Return the content of Chart.yaml. ``repository``: the address of the source code, empty if it has none."""
    version = chart["appVersion"]
    annotations = dict(chart["annotations"])
    annotations["artifacthub.io/images"] = _to_yaml(
        [
            {"name": name, "image": _name_image(registry, name, version, digest), "platforms": list(PLATFORMS)}
            for name, digest in digests.items()
        ]
    )
    annotations["artifacthub.io/changes"] = _to_yaml(_list_changes(changes))
    annotations["artifacthub.io/prerelease"] = str("-" in version).lower()
    annotations["artifacthub.io/containsSecurityUpdates"] = str(
        any(change.kind == "security" for change in changes)
    ).lower()
    if not repository:
        return {**chart, "annotations": annotations}

    annotations["artifacthub.io/links"] = _to_yaml(
        [
            {"name": "source", "url": repository},
            {"name": "documentation", "url": f"{repository}/tree/v{version}/docs"},
            {"name": "changelog", "url": f"{repository}/blob/v{version}/CHANGELOG.md"},
            {"name": "support", "url": f"{repository}/issues"},
        ]
    )
    annotations["artifacthub.io/screenshots"] = _to_yaml(
        [{"title": title, "url": f"{repository}/raw/v{version}/{path}"} for title, path in SCREENSHOTS.items()]
    )
    return {**chart, "home": repository, "sources": [repository], "annotations": annotations}


def _name_image(registry: str, name: str, version: str, digest: str) -> str:
    image = f"{registry}/ddp-operator/{name}:{version}"
    return f"{image}@{digest}" if digest else image


def _list_changes(changes: list[Change]) -> list[dict[str, str]]:
    """Return the first changes of each kind, and the number of the others."""
    shown: list[Change] = []
    for kind in dict.fromkeys(change.kind for change in changes):
        of_kind = [change for change in changes if change.kind == kind]
        shown += of_kind[:CHANGES_PER_KIND]

    omitted = len(changes) - len(shown)
    if omitted:
        shown.append(Change("changed", f"{omitted} more entries in CHANGELOG.md"))
    return [change._asdict() for change in shown]


def _to_yaml(value: Any) -> str:
    """Return an annotation's value, which is a text."""
    return format_documents([value])


def main(argv: list[str]) -> None:
    """Print the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--repository", default="", metavar="URL")
    parser.add_argument("--image", action="append", default=[], metavar="NAME=DIGEST", dest="images")
    arguments = parser.parse_args(argv)

    [chart] = load_documents((ROOT / "charts/Chart.yaml").read_text(encoding="utf-8"))
    changes = read_changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), chart["appVersion"])
    digests = dict(image.split("=", 1) for image in arguments.images)
    metadata = build_metadata(chart, changes, arguments.registry, digests, arguments.repository.rstrip("/"))
    sys.stdout.write(format_documents([metadata]))


if __name__ == "__main__":
    main(sys.argv[1:])
