"""The contract of every cluster for the custom resource itself."""

from __future__ import annotations

import pytest

from ddp_operator.api.cluster import Key, VersionConflict
from tests.support.cluster_drivers import ClusterDriver

KEY = Key("default", "train")


async def test_unchanged_resource_is_suspended(driver: ClusterDriver) -> None:
    version = (await driver.add_resource(KEY.name))["metadata"]["resourceVersion"]
    await driver.cluster.suspend_resource(KEY, resource_version=version)
    snapshot = await driver.cluster.observe(KEY)
    assert snapshot is not None
    assert snapshot.resource["spec"]["suspend"]
    with pytest.raises(VersionConflict):
        await driver.cluster.suspend_resource(KEY, resource_version=version)


async def test_deleted_resource_is_not_suspended(driver: ClusterDriver) -> None:
    with pytest.raises(VersionConflict):
        await driver.cluster.suspend_resource(KEY, resource_version="1")
