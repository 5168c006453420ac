"""What `ddp profile show` prints of a profile."""

from ddp_cli.commands.profile import list_values
from tests.support.builders import template, trainer


def test_each_value_is_described_by_its_path() -> None:
    pods = template(trainer(name="t", resources={"limits": {"nvidia.com/gpu": "8"}}), nodeSelector={"a.b/c": "d"})
    paths = dict(list_values({"template": pods}))
    assert paths["template.spec.containers[t].resources.limits[nvidia.com/gpu]"] == "8"
    assert paths["template.spec.nodeSelector[a.b/c]"] == "d"
