"""The arguments that ``python -m ddp_operator`` passes to Kopf."""

from __future__ import annotations

from typing import Any

import kopf
import pytest

from ddp_operator.__main__ import main


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of ``main``'s call of ``kopf.operator``; nothing else runs."""
    results: dict[str, Any] = {}

    async def record(**arguments: Any) -> None:
        results.update(arguments)

    monkeypatch.setattr(kopf, "operator", record)
    monkeypatch.setattr("ddp_operator.__main__._configure_logging", lambda settings: None)
    return results


def test_identity_of_settings_is_that_of_kopf_and_of_lease(
    passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_OPERATOR_IDENTITY", "ddp-operator-7d9-x2k")
    assert main([]) == 0
    assert passed["identity"] == "ddp-operator-7d9-x2k"
    assert passed["memo"]["settings"].identity == "ddp-operator-7d9-x2k"


def test_process_without_configured_identity_gets_one(passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDP_OPERATOR_IDENTITY", raising=False)
    assert main([]) == 0
    assert passed["identity"]
    assert passed["identity"] == passed["memo"]["settings"].identity


def test_operator_starts_with_a_c_library_without_mallopt(
    passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert main([]) == 0
