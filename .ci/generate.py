"""Write the generated files of this repository, or list outdated ones with ``--check``.

A generator is a module with arguments that prints the whole file. In other files this program updates only the version,
whose owner is the package.
"""

import difflib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# File: module that prints it, and its arguments.
GENERATED = {
    "deploy/crds/ddptrainingjobs.yaml": "ddp_operator.features.crd",
    "deploy/crds/clusterddptrainingprofiles.yaml": "ddp_operator.features.crd ClusterDDPTrainingProfile",
    "deploy/crds/ddptrainingprofiles.yaml": "ddp_operator.features.crd DDPTrainingProfile",
    **{
        f"deploy/schemas/{kind.lower()}.json": f"docs.pages.schemas {kind}"
        for kind in ("DDPTrainingJob", "DDPTrainingProfile", "ClusterDDPTrainingProfile")
    },
    "docs/api.md": "docs.pages.api",
    "docs/cli.md": "docs.pages.cli",
    "docs/architecture.md": "docs.pages.tables architecture",
    "docs/metrics.md": "docs.pages.tables metrics",
    "docs/troubleshooting.md": "docs.pages.tables troubleshooting",
    "docs/images/watch.svg": "docs.pictures watch",
    "charts/files/crd.yaml": "ddp_operator.features.crd",
    "deploy/manifests/crd.yaml": "ddp_operator.features.crd",
    "charts/files/cluster-profile-crd.yaml": "ddp_operator.features.crd ClusterDDPTrainingProfile",
    "charts/files/profile-crd.yaml": "ddp_operator.features.crd DDPTrainingProfile",
    "deploy/manifests/cluster-profile-crd.yaml": "ddp_operator.features.crd ClusterDDPTrainingProfile",
    "deploy/manifests/profile-crd.yaml": "ddp_operator.features.crd DDPTrainingProfile",
    "charts/files/rules.yaml": "charts.tooling.rules served",
    "charts/files/rules-home.yaml": "charts.tooling.rules home",
    "charts/files/rules-nodes.yaml": "charts.tooling.rules nodes",
    "charts/files/rules-worker.yaml": "charts.tooling.rules worker",
    "charts/files/rules-coscheduling.yaml": "charts.tooling.rules coscheduling",
    "charts/files/rules-native.yaml": "charts.tooling.rules native",
    "charts/files/rules-volcano.yaml": "charts.tooling.rules volcano",
    "charts/values.schema.json": "charts.tooling.schema",
    "charts/files/defaults.yaml": "charts.tooling.defaults",
    "charts/README.md": "charts.tooling.readme",
    "charts/files/alerts/jobs.yaml": "charts.tooling.copied deploy/monitoring/alerts/jobs.yaml",
    "charts/files/alerts/operator.yaml": "charts.tooling.copied deploy/monitoring/alerts/operator.yaml",
    "deploy/monitoring/dashboards/fleet.json": "deploy.monitoring.dashboards fleet",
    "deploy/monitoring/dashboards/job.json": "deploy.monitoring.dashboards job",
    "deploy/monitoring/dashboards/operator.json": "deploy.monitoring.dashboards operator",
    "charts/files/dashboards/fleet.json": "deploy.monitoring.dashboards fleet",
    "charts/files/dashboards/job.json": "deploy.monitoring.dashboards job",
    "charts/files/dashboards/operator.json": "deploy.monitoring.dashboards operator",
    "deploy/manifests/rbac.yaml": "charts.tooling.manifests serviceaccount.yaml rbac.yaml user-roles.yaml",
    "deploy/manifests/operator.yaml": "charts.tooling.manifests deployment.yaml service.yaml",
    "deploy/overlays/ha/budget.yaml": "charts.tooling.manifests "
    '--set {"podDisruptionBudget":{"enabled":true}} poddisruptionbudget.yaml',
    "deploy/overlays/monitoring/monitors.yaml": "charts.tooling.manifests "
    '--set {"monitoring":{"serviceMonitor":{"enabled":true},"podMonitor":{"enabled":true},'
    '"prometheusRule":{"enabled":true}}} servicemonitor.yaml podmonitor.yaml prometheusrule.yaml',
}

# Files with the version of the package, and its places in them.
VERSIONED = ("charts/Chart.yaml", "docs/tutorial.md", "images/*/Dockerfile", "deploy/samples/*.yaml")
VERSION = re.compile(
    r"(?m)(^(?:appVersion|version): |^ARG VERSION=|ddp-operator/(?:operator|trainer):)\d+\.\d+\.\d+(?=-cuda$|\s|$)"
)


def stamp(text: str) -> str:
    """Return a text with the package's version wherever one stands that follows it."""
    source = (ROOT / "operator/ddp_operator/_version.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    return VERSION.sub(rf"\g<1>{version}", text)


class GeneratorError(Exception):
    """A generator failed; the text is its standard error."""


def write(module: str) -> str | GeneratorError:
    """Return what a generator prints, or why it failed."""
    command = [sys.executable, "-m", *module.split()]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout if ran.returncode == 0 else GeneratorError(f"{module} failed:\n{ran.stderr}")


def main(argv: list[str]) -> int:
    """Return 1 if ``--check`` found a difference."""
    if "--check" in argv:
        return 1 if compare(check=True) else 0
    # Some generators read generated files, so repeat until nothing changes.
    while compare(check=False):
        pass
    return 0


def compare(*, check: bool) -> int:
    """Return the number of outdated files; without ``check`` write them.

    A generator may fail because a file that it reads is outdated: a manifest, after a new value of the chart. Raises:
    SystemExit, if one fails and no file was written.
    """
    differ = 0
    modules = sorted(set(GENERATED.values()))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(modules, pool.map(write, modules), strict=True))
    errors = [result for result in results.values() if isinstance(result, GeneratorError)]
    expected: dict[str, tuple[str, str]] = {}
    for name, module in GENERATED.items():
        result = results[module]
        if isinstance(result, str):
            expected[name] = (result, f"what {module} writes")
    for path in sorted(path for pattern in VERSIONED for path in ROOT.glob(pattern)):
        version = (stamp(path.read_text(encoding="utf-8")), "itself with the package's version")
        expected[str(path.relative_to(ROOT))] = version
    for name, (text, source) in expected.items():
        path = ROOT / name
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        if text == present:
            print(f"{name}: as generated")
            continue
        differ += 1
        if check:
            diff = difflib.unified_diff(present.splitlines(True), text.splitlines(True), name, source)
            sys.stdout.writelines(diff)
            print(f"{name}: differs from {source}: run `make generate`")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{name}: written")
    if errors and (check or not differ):
        raise SystemExit("\n".join(map(str, errors)))
    return differ


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
