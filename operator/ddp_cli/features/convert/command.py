"""`ddp convert`: convert a Kubeflow PyTorchJob's YAML to a DDPTrainingJob's, with comments on the differences."""

import argparse
import sys

from ddp_cli.commands.io import ExitCode
from ddp_cli.view.terminal import print_manifest, print_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="the YAML with one or more PyTorchJobs; - reads standard input")
    parser.epilog = (
        "The result is checked as by `ddp render`. If you have to complete it by hand, the errors are listed and the "
        "exit code is 1."
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the converted jobs, and the file's other objects unchanged. Raises: CommandError, InvalidManifest."""
    from ddp_cli.client.validation import check_manifest
    from ddp_cli.commands.io import read_file
    from ddp_cli.features.convert.other_jobs import explain_other_kind
    from ddp_cli.features.convert.pytorchjob import convert
    from ddp_operator.api.documents import load_documents
    from ddp_operator.api.errors import FieldError, InvalidManifest
    from ddp_operator.api.yaml_writer import format_documents

    documents = load_documents(read_file(arguments.file, "a PyTorchJob's YAML"))
    refusals = [FieldError("kind", text) for text in map(explain_other_kind, documents) if text]
    if not any(document.get("kind") == "PyTorchJob" for document in documents):
        kinds = ", ".join(sorted({str(document.get("kind")) for document in documents})) or "nothing"
        message = f"the file has no kubeflow.org/v1 PyTorchJob (found: {kinds})"
        raise InvalidManifest(refusals or [FieldError("kind", message)])
    code = ExitCode.OK
    for refusal in refusals:
        code = ExitCode.FAILED
        print_text(f"ddp convert: {refusal}", file=sys.stderr)
    parts = []
    for document in documents:
        if document.get("kind") != "PyTorchJob":
            parts.append(format_documents([document]))
            continue
        written = convert(document).write()
        parts.append(written)
        try:
            check_manifest(written)
        except InvalidManifest as error:
            code = ExitCode.FAILED
            print_text(f"ddp convert: complete the printed job by hand:\n{error}", file=sys.stderr)
    print_manifest("---\n".join(parts))
    return code
