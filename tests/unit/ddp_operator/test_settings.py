"""The operator's settings."""

from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from ddp_operator.decide.hooks import Feature
from ddp_operator.manager.settings import Settings, SettingsError, describe


def test_every_variable_is_read() -> None:
    settings = Settings.from_env(
        {
            "DDP_OPERATOR_NAMESPACES": "team-a, team-b,,team-a",
            "DDP_OPERATOR_WORKERS": "3",
            "DDP_OPERATOR_QPS": "12.5",
            "DDP_OPERATOR_BURST": "7",
            "DDP_OPERATOR_CALL_TIMEOUT": "5",
            "DDP_OPERATOR_PROGRESS_INTERVAL": "30",
            "DDP_OPERATOR_RESYNC_INTERVAL": "60",
            "DDP_OPERATOR_LOG_FORMAT": "JSON",
            "DDP_OPERATOR_LOG_LEVEL": "warning",
            "DDP_OPERATOR_HEALTH_PORT": "9000",
            "DDP_OPERATOR_LEASE_NAME": "team",
            "DDP_OPERATOR_LEASE_SECONDS": "30",
            "DDP_OPERATOR_IDENTITY": "pod-a",
            "KUBECONFIG": "/x/y",
        }
    )
    assert settings == Settings(
        namespaces=("team-a", "team-b"),
        workers=3,
        qps=12.5,
        burst=7,
        call_timeout=5,
        progress_interval=30,
        resync_interval=60,
        log_format="json",
        log_level="warning",
        health_port=9000,
        lease_name="team",
        lease_seconds=30,
        identity="pod-a",
        kubeconfig="/x/y",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKERS", "0"),
        ("WORKERS", "many"),
        ("WORKERS", "2.5"),
        ("QPS", "nan"),
        ("QPS", "-1"),
        ("BURST", "1k"),
        ("CALL_TIMEOUT", "0"),
        ("PROGRESS_INTERVAL", "0.1"),
        ("RESYNC_INTERVAL", "x"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
        ("HEALTH_PORT", "70000"),
        ("HEALTH_PORT", "tcp://10.0.0.1:8080"),  # as Kubernetes sets it for a Service named ddp-operator-health
        ("LEASE_NAME", "My_Lease"),
        ("LEASE_SECONDS", "1"),
        ("NAMESPACES", "a b"),
        ("NAMESPACES", "team-*"),
    ],
)
def test_bad_value_is_refused_with_its_name_and_remedy(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({f"DDP_OPERATOR_{name}": value})
    message = str(caught.value)
    assert message.startswith(f"DDP_OPERATOR_{name}: ")
    assert value in message
    assert " is invalid: " in message
    assert describe().partition(f"DDP_OPERATOR_{name} ")[2].splitlines()[0].strip() in message


class MenuSettings(msgspec.Struct, frozen=True):
    """Settings of a feature, one of them in JSON."""

    menu: Annotated[dict[str, Any], Meta(description="a menu in JSON")] = {}


MENU = Feature("menu", maturity="experimental", page="x.md", settings=MenuSettings)


def test_setting_of_several_values_is_read_as_json() -> None:
    settings = Settings.from_env({"DDP_OPERATOR_MENU": '{"soup": ["hot"]}'}, (MENU,))
    assert settings.features == {"menu": MenuSettings({"soup": ["hot"]})}
    assert Settings.from_env({}, (MENU,)).features == {"menu": MenuSettings()}


@pytest.mark.parametrize("value", ["soup: hot", '["soup"]'])
def test_bad_json_is_refused_with_name_of_setting(value: str) -> None:
    with pytest.raises(SettingsError, match=r"^DDP_OPERATOR_MENU: .* is invalid: .*Set it to: a menu in JSON"):
        Settings.from_env({"DDP_OPERATOR_MENU": value}, (MENU,))


def test_help_names_every_variable_that_is_read() -> None:
    class RecordingEnviron(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            asked.append(name)
            return default

    asked: list[str] = []
    Settings.from_env(RecordingEnviron())
    shown = {line.split()[0] for line in describe().splitlines()}
    assert shown == {name for name in asked if name.startswith("DDP_OPERATOR_")}
