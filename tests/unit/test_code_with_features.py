"""``spec.code`` beside other features."""

import pytest

from ddp_operator.api.errors import InvalidManifest
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import job, template, trainer


def test_input_in_the_folder_of_the_code_is_refused() -> None:
    code = {"source": "configmap/ddp-code-1", "digest": "1" * 64}
    entry = {"url": "https://host/file", "mountPath": "/workspace", "claimName": "data"}
    with pytest.raises(InvalidManifest, match=r"spec.inputs\[0\].mountPath: .*spec.code.mountPath"):
        resolve_template(job(code=code, inputs=[entry]))


def test_mount_at_the_folder_of_the_code_is_refused() -> None:
    code = {"source": "configmap/ddp-code-1", "digest": "1" * 64}
    made = template(trainer(volumeMounts=[{"name": "v", "mountPath": "/src/"}]), volumes=[{"name": "v"}])
    with pytest.raises(InvalidManifest) as error:
        resolve_template(job(template=made, code=code | {"mountPath": "/src"}))
    [problem] = error.value.errors
    assert problem.path == "spec.template.spec.containers[0].volumeMounts[0].mountPath"
    assert "spec.code.mountPath" in problem.message
    assert resolve_template(job(template=made, code=code))
