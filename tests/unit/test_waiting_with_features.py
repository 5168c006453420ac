"""Why pods wait, with other features."""

from __future__ import annotations

from ddp_operator.decide.hooks import Hooks
from ddp_operator.features import inputs, waiting
from tests.support.fake_cluster import ReconcilerHarness

ONE = {"url": "https://example.com/set/data.bin", "mountPath": "/data", "claimName": "data"}


async def test_reason_of_fetch_pod_is_reason_of_job() -> None:
    h = await ReconcilerHarness(hooks=Hooks((inputs.FEATURE, waiting.FEATURE)), inputs=[ONE]).settle()
    [pod] = h.pods()
    state = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    status = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": state}]}
    h.cluster.store.change(pod, status=status, spec={**pod["spec"], "nodeName": "a"})
    await h.settle()
    assert h.state("InputsReady") == ("False", "ImagePull")
    assert "no such image" in h.condition("InputsReady").message
