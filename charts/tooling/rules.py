"""Print the rules of the operator's roles: exactly what the operator checks at its start that it may do.

``python -m charts.tooling.rules`` prints those for the namespaces that it serves (``served``), for its own one
(``home``), for the Leases of nodes (``nodes``), or for a gang scheduler's groups; ``make generate`` writes them to
``charts/files/rules*.yaml``.
"""

import sys
from collections.abc import Mapping, Sequence

from ddp_operator.features import SCHEMA
from ddp_operator.features.gangs.fields import PERMISSIONS as GANG_PERMISSIONS
from ddp_operator.kube.resources import group, plural
from ddp_operator.kube.startup_checks import (
    HOME_PERMISSIONS,
    NODE_PERMISSIONS,
    WORKER_PERMISSIONS,
    list_permissions,
    split_permission,
)

EMPTY = '""'
HEADER = "# Generated from operator/ddp_operator/kube/startup_checks.py by `make generate`. Do not edit.\n"


def render_rules(permissions: Mapping[str, Sequence[str]]) -> str:
    """Return the rules as YAML: one a resource, in the order in which the operator lists them."""
    rules = []
    for what, verbs in permissions.items():
        kind, subresource, name = split_permission(what)
        resource = f"{plural(kind)}/{subresource}" if subresource else plural(kind)
        rows = [f"apiGroups: [{group(kind) or EMPTY}]", f"resources: [{resource}]", f"verbs: [{', '.join(verbs)}]"]
        rows += [f"resourceNames: [{name}]"] if name else []
        rules.append("- " + "\n  ".join(rows) + "\n")
    return HEADER + "".join(rules)


if __name__ == "__main__":
    tables = {
        "served": list_permissions(SCHEMA.shared_kinds),
        "home": HOME_PERMISSIONS,
        "nodes": NODE_PERMISSIONS,
        "worker": WORKER_PERMISSIONS,
        **GANG_PERMISSIONS,
    }
    sys.stdout.write(render_rules(tables[sys.argv[1]]))
