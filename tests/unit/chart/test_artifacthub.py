"""The chart's annotations for Artifact Hub: static ones, and those that a release build adds."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from charts.tooling.artifacthub import Change, build_metadata, read_changes
from tests.support import ROOT
from tests.support.chart import CHART

REPOSITORY = "https://github.com/team/ddp-operator"
DIGEST = f"sha256:{'a' * 64}"
CHANGELOG = """# Changelog

## [1.1.0] - unreleased

### Added

- A field that
  needs [two lines](docs/api.md).
- A command:

  | before | now |
  |---|---|

### Security

- A fix.

## [1.0.0] - 2026-01-01

### Added

- Everything.
"""


def read_chart() -> dict[str, Any]:
    return yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))


def read_annotation(metadata: dict[str, Any], name: str) -> Any:
    """Return the value of an annotation that is a YAML text."""
    return yaml.safe_load(metadata["annotations"][f"artifacthub.io/{name}"])


def build(changes: list[Change] | None = None, repository: str = REPOSITORY) -> dict[str, Any]:
    return build_metadata(read_chart(), changes or [], "ghcr.io/team", {"operator": DIGEST, "trainer": ""}, repository)


def test_listed_definitions_are_those_of_the_chart() -> None:
    listed = {entry["name"]: (entry["kind"], entry["version"]) for entry in read_annotation(read_chart(), "crds")}
    definitions = [yaml.safe_load(path.read_text()) for path in (ROOT / "deploy/crds").iterdir()]
    assert listed == {
        crd["metadata"]["name"]: (crd["spec"]["names"]["kind"], crd["spec"]["versions"][0]["name"])
        for crd in definitions
    }


def test_links_and_screenshots_name_the_tag_of_the_version() -> None:
    metadata = build()
    tag = f"v{read_chart()['appVersion']}"
    links = {entry["name"]: entry["url"] for entry in read_annotation(metadata, "links")}
    assert links["source"] == metadata["home"] == REPOSITORY
    assert links["changelog"] == f"{REPOSITORY}/blob/{tag}/CHANGELOG.md"
    assert set(links) == {"source", "documentation", "changelog", "support"}
    screenshots = read_annotation(metadata, "screenshots")
    assert all(entry["url"].startswith(f"{REPOSITORY}/raw/{tag}/docs/images/") for entry in screenshots)


def test_changes_are_the_entries_of_the_version() -> None:
    changes = read_changes(CHANGELOG, "1.1.0")
    expected = [
        {"kind": "added", "description": "A field that needs two lines."},
        {"kind": "added", "description": "A command:"},
        {"kind": "security", "description": "A fix."},
    ]
    metadata = build(changes)
    assert read_annotation(metadata, "changes") == expected
    assert metadata["annotations"]["artifacthub.io/containsSecurityUpdates"] == "true"


def test_changelog_without_the_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no section \[2\.0\.0\]"):
        read_changes(CHANGELOG, "2.0.0")
