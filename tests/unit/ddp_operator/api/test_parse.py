"""From text to a typed job: accepted and refused manifests, and the messages of refusals."""

from typing import Any

import pytest
import yaml

from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import FieldError, InvalidManifest
from ddp_operator.api.job_file import parse_manifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.spec import Spec
from ddp_operator.api.status import Status
from ddp_operator.features import SCHEMA
from tests.support.builders import resource, template

NO_OBJECT = "the file: contains a document that is not a Kubernetes object; remove it, or pass the path of a job's YAML"


def parse(**spec: Any) -> Spec:
    return parse_manifest(yaml.safe_dump(resource(**spec)), SCHEMA).job.spec


def refusal(text: str | dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidManifest) as refused:
        parse_manifest(text if isinstance(text, str) else yaml.safe_dump(text), SCHEMA)
    return [str(error) for error in refused.value.errors]


class TestDefaults:
    def test_template_alone_is_enough(self) -> None:
        spec = parse()
        assert (spec.nodes, spec.proc_per_node, spec.suspend) == (1, "auto", False)
        assert (spec.rendezvous.backend, spec.rendezvous.port, spec.metrics.port) == ("c10d", 29400, 9400)
        assert spec.recovery.non_retryable_exit_codes == (2, 126, 127)

    @pytest.mark.parametrize("field", ["recovery", "rendezvous", "nodes", "checkpoint", "activeDeadlineSeconds"])
    def test_null_equals_omitted_field(self, field: str) -> None:
        assert parse(**{field: None}) == parse()

    def test_null_in_template_is_kept(self) -> None:
        assert parse(template=template(nodeSelector=None)).template.spec["nodeSelector"] is None

    @pytest.mark.parametrize(("backend", "given", "expected"), [("c10d", None, 3), ("static", None, 0), ("c10d", 5, 5)])
    def test_in_place_restarts_follow_rendezvous(self, backend: str, given: int | None, expected: int) -> None:
        raw = resource(rendezvous={"backend": backend}, recovery={"inPlaceRestarts": given})
        assert parse_manifest(yaml.safe_dump(raw), SCHEMA).job.in_place_restarts == expected


class TestJobFile:
    def test_other_objects_are_returned(self) -> None:
        text = yaml.safe_dump_all([{"kind": "ConfigMap", "metadata": {"name": "c"}}, resource()]) + "---\n"
        assert [second["kind"] for second in parse_manifest(text, SCHEMA).others] == ["ConfigMap"]

    @pytest.mark.parametrize("number", [2**63, 2**64, 1e22])
    def test_number_beyond_64_bits_is_no_integer(self, number: float) -> None:
        (message,) = refusal(yaml.safe_dump(resource(elastic={"minNodes": number, "maxNodes": 4})))
        assert 'spec.elastic.minNodes in body must be of type integer: "number"' in message

    def test_mistyped_member_of_metadata_is_refused_as_by_kubectl(self) -> None:
        manifest = resource()
        manifest["metadata"] |= {"namespacex": "default", "labelz": {}}
        assert refusal(yaml.safe_dump(manifest)) == [
            'unknown field "metadata.labelz"; did you mean labels?',
            'unknown field "metadata.namespacex"; did you mean namespace?',
        ]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "kind: the file has no kind DDPTrainingJob (found: nothing); `ddp init SCRIPT` writes one"),
            ("kind: Job\n", "kind: the file has no kind DDPTrainingJob (found: Job); `ddp init SCRIPT` writes one"),
            ("- 1\n", NO_OBJECT),
            ("just words\n", NO_OBJECT),
            ("a: [1\n", "line 2, column 1: not valid YAML: did not find expected ',' or ']'"),
            ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: found character that cannot start any token (a tab"),
            ("a: 1\nb: 2\na: 3\n", 'line 3: key "a" is duplicated; remove one'),
            ("{? [a] : 1}\n", "line 1: the key is not a string; quote it"),
            ("~: 1\n", "line 1: the key is not a string; quote it"),
            ("a:\n  - .inf\n", "line 2: .inf is no number in JSON; quote it"),
            ("a: 1\n--- {b: 2}\n", "line 2: not valid YAML: text after ---"),
            ("x: {yes: 1, on: 2}\n", 'line 1: key "true" is duplicated; remove one'),
            ("<<: [{a: 1}, 2]\n", "line 1: << must name an object or a list of objects"),
            ("a: !!int x\n", "line 1: the value is no !!int"),
            ("a: !!python/object:os.system x\n", "no kind DDPTrainingJob"),
            ("a: \x00\n", "not valid YAML"),
            ("a: &a [*a]\n", ""),
        ],
        ids=[
            "empty", "another kind", "list", "scalar", "unclosed", "tab", "duplicate key", "list as key", "null as key",
            "infinite", "separator", "duplicate boolean", "merge", "tag", "python object", "control character",
            "recursion",
        ],
    )  # fmt: skip
    def test_malformed_file_is_refused_in_one_sentence(self, text: str, words: str) -> None:
        [message] = refusal(text)
        assert words in message


class TestWords:
    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ({"node": 2}, 'unknown field "spec.node"; did you mean nodes?'),
            ({"recovery": {"maxRestart": 2}}, 'unknown field "spec.recovery.maxRestart"; did you mean maxRestarts?'),
            ({"nodesx": None}, 'unknown field "spec.nodesx"; did you mean nodes?'),
            ({"elastic": {"zzz": 1}}, 'unknown field "spec.elastic.zzz"; known fields: minNodes, maxNodes'),
            (
                {"nodes": "2"},
                'spec.nodes: Invalid value: "string": spec.nodes in body must be of type integer: "string"; '
                "write a whole number, without quotes",
            ),
            (
                {"suspend": "no"},
                'spec.suspend: Invalid value: "string": spec.suspend in body must be of type boolean: "string"; '
                "write true or false, without quotes",
            ),
            (
                {"template": []},
                'spec.template: Invalid value: "array": spec.template in body must be of type object: "array"; '
                "write its fields below it: metadata, spec",
            ),
            ({"template": None}, "spec.template: Required value: it has no default; add it"),
            ({"checkpoint": {}}, "spec.checkpoint.path: Required value: it has no default; add it"),
            (
                {"rendezvous": {"backend": "etcd"}},
                'spec.rendezvous.backend: Unsupported value: "etcd": supported values: "c10d", "static"',
            ),
            (
                {"recovery": {"nonRetryableExitCodes": [1, "x"]}},
                'spec.recovery.nonRetryableExitCodes[1]: Invalid value: "string": '
                'spec.recovery.nonRetryableExitCodes[1] in body must be of type integer: "string"; '
                "write a whole number, without quotes",
            ),
        ],
    )
    def test_name_field_problem_and_remedy(self, spec: dict[str, Any], words: str) -> None:
        assert refusal(resource(**spec)) == [words]

    @pytest.mark.parametrize(
        ("metadata", "words"),
        [
            ({}, "metadata.name: Required value: add a name"),
            (None, "metadata.name: Required value: add a name"),
            ("x", "metadata: must be an object with a name"),
            ({"name": 7}, "metadata.name: Invalid value: 7: must be a string; quote it"),
            ({"name": "a", "namespace": 1}, "metadata.namespace: Invalid value: 1: must be a string"),
            (
                {"name": "a", "labels": {"x": 1}},
                "metadata.labels: must map strings to strings; quote numbers and booleans",
            ),
            (
                {"name": "a", "annotations": ["x"]},
                "metadata.annotations: must map strings to strings; quote numbers and booleans",
            ),
        ],
    )
    def test_mistake_in_metadata_is_named(self, metadata: Any, words: str) -> None:
        assert refusal(resource() | {"metadata": metadata}) == [words]

    def test_unknown_api_version_is_named(self) -> None:
        assert refusal(resource() | {"apiVersion": "ddp-operator.dev/v1"}) == [
            'apiVersion: Invalid value: "ddp-operator.dev/v1": must be ddp-operator.dev/v1alpha1; change it'
        ]

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (FieldError("", "words"), "words"),
            (FieldError("a.b", "words"), "a.b: words"),
            (FieldError("a.b", "words", 3), "a.b: Invalid value: 3: words"),
            (FieldError("a.b", "words", "x"), 'a.b: Invalid value: "x": words'),
            (FieldError("a.b", "words", {"x": 1}), "a.b: Invalid value: words"),
            (FieldError("a.b", "words", None), "a.b: Invalid value: null: words"),
        ],
    )
    def test_are_printed_as_api_server_prints_them(self, error: FieldError, text: str) -> None:
        assert str(error) == text


class TestStored:
    def test_identity_and_status_are_read(self) -> None:
        raw = resource()
        raw["metadata"] |= {"uid": "u", "generation": 3, "resourceVersion": "7", "deletionTimestamp": "x"}
        raw["status"] = {"attempt": 2, "somethingNewer": {"a": 1}}
        job = parse_resource(raw, SCHEMA)
        assert (job.uid, job.generation, job.resource_version, job.deleting) == ("u", 3, "7", True)
        assert job.status.attempt == 2

    @pytest.mark.parametrize("status", [{"attempt": "two"}, {"conditions": [{}]}, [], "x"])
    def test_unreadable_status_counts_as_none(self, status: Any) -> None:
        assert parse_resource(resource() | {"status": status}, SCHEMA).status == Status()


def nest(levels: int, width: int) -> str:
    lines = ["a0: &a0 [x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        nest(8, 9),
        "text: &t " + "x" * 100_000 + "\nmore: [" + ", ".join(["*t"] * 1000) + "]",
        "a: &a [*a]",
        "m0: &m0 {a: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 8)),
        "a: " + "[" * 101 + "]" * 101,
        "a: [" + "1, " * 200_001 + "]",
        "\n---\n".join([nest(6, 9)] * 4),
    ],
    ids=["aliases", "long text", "alias of itself", "merges", "depth", "values", "sum of documents"],
)
def test_manifest_that_expands_too_far_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest, match=r"the file: not valid YAML: expands to more than .* use fewer aliases"):
        load_documents(text)


def test_oversized_file_is_refused_before_reading() -> None:
    with pytest.raises(InvalidManifest, match="has more than 16 MiB"):
        load_documents("#" * (16 << 20) + "\n")
