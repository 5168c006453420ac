"""The way of a job's code into the cluster: whether it can mount an image is checked before any upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from ddp_cli.client.api import Api
from ddp_cli.client.code import stored_code
from ddp_cli.client.errors import ApiError, ClientError
from ddp_cli.client.packing.packed import pack_code
from ddp_operator.api.parse import parse_resource
from tests.support.builders import resource
from tests.support.registry import Registry, serve_registry


class PodServer:
    """An API server that drops the unknown fields of a pod's volumes, or refuses the pod."""

    namespace = "default"

    def __init__(self, keeps: bool = True, refusal: ApiError | None = None) -> None:
        self.keeps = keeps
        self.refusal = refusal

    def request(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        assert (method, path, query) == ("POST", "/api/v1/namespaces/default/pods", {"dryRun": "All"})
        if self.refusal is not None:
            raise self.refusal
        return body if self.keeps else body | {"spec": {"volumes": [{"name": "code", "emptyDir": {}}]}}


def place(server: PodServer, folder: Path, registry: Registry) -> str:
    """Return the messages about the folder of a job."""
    (folder / "train.py").write_text("")
    code = pack_code(folder, image=f"{registry.host}/team/code")
    with stored_code(cast(Api, server), code, parse_resource(resource("x", code=dict(code.spec)))) as message:
        return message


def test_image_is_pushed_where_its_volume_is_kept(tmp_path: Path) -> None:
    with serve_registry(Registry()) as registry:
        assert place(PodServer(), tmp_path, registry).startswith(f"pushed as {registry.host}/team/code:")
        assert registry.pushed() == 6


def test_nothing_is_pushed_if_api_server_drops_image_volumes(tmp_path: Path) -> None:
    with serve_registry(Registry()) as registry:
        with pytest.raises(ClientError, match=r"the cluster does not support image volumes.*--code-claim NAME"):
            place(PodServer(keeps=False), tmp_path, registry)
        with pytest.raises(ApiError, match="cannot connect"):
            place(PodServer(refusal=ApiError("cannot connect")), tmp_path, registry)
        assert registry.calls == []


def test_missing_pod_permission_does_not_block(tmp_path: Path) -> None:
    with serve_registry(Registry()) as registry:
        place(PodServer(refusal=ApiError("pods is forbidden", 403)), tmp_path, registry)
        assert registry.pushed() == 6
