"""``spec.watchdog``: its rules, and the plan of the pods."""

from ddp_operator.features.stalls import FEATURE
from ddp_operator.manifests.pod import build_plan
from ddp_operator.manifests.template import resolve_template
from ddp_pod.contract.plan import WatchdogConfig
from tests.support.builders import job
from tests.support.fields import check_fields, list_fixed

PATH = "spec.watchdog"
YEAR = 366 * 24 * 3600


def test_times_are_bounded() -> None:
    bad = {
        f"{PATH}.startSeconds": (0, YEAR + 1),
        f"{PATH}.stallSeconds": (0, -1),
        f"{PATH}.checkpointSeconds": (0, 2**70),
    }
    check_fields(FEATURE, {f"{PATH}.stallSeconds": (1, YEAR)}, bad)


def test_it_is_fixed_once_pod_has_run() -> None:
    assert list_fixed(FEATURE, PATH, {"stallSeconds": 60}, {"stallSeconds": 61}) == [True, True]


def test_pods_get_its_times_and_defaults() -> None:
    typed = job(watchdog={"stallSeconds": 60, "action": "Report"})
    plan = build_plan(typed, resolve_template(typed), attempt=1, nodes=1)
    assert plan.watchdog == WatchdogConfig(900, 60, 1800, "Report")
