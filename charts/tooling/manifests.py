"""Print objects of the rendered chart as plain manifests, for those who use kustomize instead of Helm.

``python -m charts.tooling.manifests [--set VALUES] TEMPLATE…`` prints the objects of these templates, with VALUES (as
JSON) over the chart's defaults; ``make generate`` writes them below ``deploy``. So both ways install the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import helm_python

from ddp_operator.api.documents import load_documents
from ddp_operator.api.yaml_writer import format_documents

CHART = Path(__file__).resolve().parent.parent
NAME = "ddp-operator"
HEADER = "# Generated from the chart (charts/) by `make generate`. Do not edit.\n"


def read_objects(templates: list[str], values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of these templates, without Helm's own labels."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name=NAME, namespace=NAME)
    objects = [document for template in templates for document in load_documents(texts[f"{NAME}/templates/{template}"])]
    for found in objects:
        _relabel(found)
    return objects


def _relabel(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _relabel(item)
    if not isinstance(node, dict):
        return
    labels = node.get("labels")
    if isinstance(labels, dict) and labels.get("app.kubernetes.io/managed-by") == "Helm":
        labels["app.kubernetes.io/managed-by"] = "kustomize"
        del labels["helm.sh/chart"]
    for child in node.values():
        _relabel(child)


def main(argv: list[str]) -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", type=json.loads, default={}, metavar="VALUES")
    parser.add_argument("templates", nargs="+", metavar="TEMPLATE")
    arguments = parser.parse_args(argv)
    objects = read_objects(arguments.templates, arguments.set)
    sys.stdout.write(HEADER + format_documents(objects))


if __name__ == "__main__":
    main(sys.argv[1:])
