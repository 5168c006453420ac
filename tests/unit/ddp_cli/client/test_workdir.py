"""Checks of a job together with the folder of its code."""

from __future__ import annotations

import pytest
import yaml

from ddp_cli.client.workdir import check_job
from tests.support.builders import resource, template, trainer


@pytest.mark.parametrize(
    ("container", "in_cluster", "is_warned"),
    [
        ({"command": None, "args": ["python", "train.py"]}, True, True),
        ({"command": None, "args": ["python", "train.py"]}, False, False),
        ({"command": ["python"], "args": ["train.py"]}, True, False),
    ],
)
def test_skipped_entrypoint_of_an_image_is_noted(
    container: dict[str, list[str]], in_cluster: bool, is_warned: bool
) -> None:
    notes: list[str] = []
    text = yaml.safe_dump(resource(template=template(trainer(**container))))
    check_job(text, None, in_cluster=in_cluster, note=notes.append)
    assert any("the image's entrypoint does not run" in note for note in notes) is is_warned
