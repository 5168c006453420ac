"""Credentials: kubeconfig files, service accounts, plugins."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_operator.kube.client import StartupError
from ddp_operator.kube.credentials import _from_service_account, login
from tests.support.users import forget_user


def kubeconfig(path: Path, *, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": "https://10.0.0.1:6443", **cluster}}],
                "users": [{"name": "u", "user": user or {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
                "current-context": "x",
            }
        )
    )
    return path


async def test_paths_are_relative_to_file_that_names_them(tmp_path: Path) -> None:
    user = {"client-certificate": "me.crt", "client-key": "/abs/me.key"}
    path = kubeconfig(tmp_path / "config", user=user, **{"certificate-authority": "pki/ca.crt"})
    info = await login(str(path))
    assert info.ca_path == str(tmp_path / "pki/ca.crt")
    assert info.certificate_path == str(tmp_path / "me.crt")
    assert info.private_key_path == "/abs/me.key"


async def test_token_file_is_read_and_will_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    path = kubeconfig(tmp_path / "config", user={"tokenFile": "token"})
    first = await login(str(path))
    (tmp_path / "token").write_text("second\n")
    second = await login(str(path))
    assert (first.token, second.token) == ("first", "second")
    assert first.expiration is not None
    assert datetime.now(UTC) < first.expiration < datetime.now(UTC) + timedelta(hours=1)


async def test_first_value_of_several_kubeconfigs_wins(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_text(yaml.safe_dump({"users": [{"name": "u", "user": {"token": "mine"}}]}))
    second = kubeconfig(tmp_path / "second", user={"token": "theirs"})
    info = await login(os.pathsep.join([str(first), str(tmp_path / "missing"), str(second)]))
    assert info.token == "mine"
    assert info.server == "https://10.0.0.1:6443"


async def test_credential_plugin_is_refused_with_remedy(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", user={"exec": {"command": "aws"}})
    with pytest.raises(StartupError, match=r"credential plugin.*kubectl create token"):
        await login(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("{", "not a kubeconfig"),
        ("- a", "not a kubeconfig"),
        ("clusters: []", "no current-context"),
        ("current-context: x", "not among its contexts"),
        ("{current-context: x, contexts: [{name: x, context: {cluster: c}}]}", "names a cluster that does not exist"),
        (
            "{current-context: x, contexts: [{name: x, context: {cluster: c}}], clusters: [{name: c, cluster: {}}]}",
            "has no server",
        ),
    ],
)
async def test_invalid_kubeconfig_is_refused_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StartupError) as caught:
        await login(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_missing_credentials_report_names_three_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StartupError, match=r"service account.*KUBECONFIG.*~/\.kube/config"):
        await login(None, service_account=tmp_path)


async def test_user_without_home_folder_gets_same_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_user(monkeypatch)
    with pytest.raises(StartupError, match=r"service account.*KUBECONFIG.*~/\.kube/config"):
        await login(None, service_account=tmp_path)
    with pytest.raises(StartupError, match=r"~/mine: no such file"):
        await login("~/mine", service_account=tmp_path)


async def test_service_account_precedes_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube" / "config", user={"token": "home"})
    assert (await login(None, service_account=tmp_path)).token == "home"
    (tmp_path / "token").write_text("pod\n")
    assert (await login(None, service_account=tmp_path)).token == "pod"


@pytest.mark.parametrize(
    ("env", "server"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}, "https://10.96.0.1:6443"),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1"}, "https://[fd00::1]:443"),
        ({}, "https://kubernetes.default.svc"),
    ],
)
def test_pod_finds_its_api_server(tmp_path: Path, env: dict[str, str], server: str) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "ca.crt").write_text("ca")
    (tmp_path / "namespace").write_text("ddp-system\n")
    info = _from_service_account(tmp_path, env)
    assert (info.server, info.ca_path, info.default_namespace) == (server, str(tmp_path / "ca.crt"), "ddp-system")
