"""What `ddp profile show` prints of a profile, and the commands that need one."""

from pathlib import Path

import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.features.profiles.command import list_values
from tests.support.builders import resource, template, trainer


def test_each_value_is_described_by_its_path() -> None:
    pods = template(trainer(name="t", resources={"limits": {"nvidia.com/gpu": "8"}}), nodeSelector={"a.b/c": "d"})
    paths = dict(list_values({"template": pods}))
    assert paths["template.spec.containers[t].resources.limits[nvidia.com/gpu]"] == "8"
    assert paths["template.spec.nodeSelector[a.b/c]"] == "d"


def test_profile_that_only_a_cluster_has_is_no_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(resource(profileRef={"name": "h100"})))
    assert main(["submit", str(file)]) == 4
    assert "no cluster is configured" in capsys.readouterr().err
