"""Texts that YAML's readers take for other values pass through `ddp mcp` as texts."""

from __future__ import annotations

from ddp_cli.client.client import Client
from ddp_cli.features.mcp.tools import JobTools
from tests.unit.ddp_cli.commands.test_scalars import Recorder, check_texts, client

__all__ = ["client"]


def test_texts_are_written_as_given(client: Client) -> None:
    assert isinstance(client.backend, Recorder)
    check_texts(JobTools(lambda _: client, local=True).render_manifest(client.backend.text, whole=True))
