"""Warnings about a valid training command that probably does something else than its author expects. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ddp_operator.manifests.exit_codes import describe_hidden_exit
from ddp_operator.manifests.shell import list_commands
from ddp_operator.manifests.template import ResolvedTemplate

# Commands that create, fetch or install files.
_SET_UP: Final = re.compile(
    r"(?:sudo )?(?:git (?:clone|pull|checkout|lfs)|(?:\S*python[\d.]* -m )?pip[\d.]* install|uv (?:pip|sync|add)"
    r"|(?:conda|mamba|micromamba|poetry|apt|apt-get|yum|dnf|apk|npm) |(?:wget|curl|gdown|gsutil|cp|mv|ln|tar|unzip|rm) "
    r"|mkdir (?!-p)|(?:aws s3|hf download|huggingface-cli download|dvc pull)\b|\S*python[\d.]* setup\.py)"
)
_SHOWN: Final = 3
ENTRYPOINT: Final = (
    "has args without command: the image's entrypoint does not run. If the training needs it, write it before its "
    "arguments: command: [/entrypoint.sh]"
)


def list_warnings(template: ResolvedTemplate, *, in_cluster: bool) -> Iterator[str]:
    """Yield warnings about the command of the container that trains."""
    subject = f"container {template.trainer['name']}"
    hidden = describe_hidden_exit(template.command.argv) if template.command.program else ""
    if hidden:
        yield f"the command of {subject} hides failures: {hidden}"
    if in_cluster and skips_entrypoint(template.trainer):
        yield f"{subject} {ENTRYPOINT}"
    repeated = describe_repeated_set_up(template.command.argv) if template.nproc > 1 else ""
    if repeated:
        yield f"the command of {subject} runs once in each of the {template.nproc} ranks of a pod, also {repeated}"


def skips_entrypoint(container: Mapping[str, Any]) -> bool:
    """Return whether a container's arguments are those of its image's entrypoint."""
    return bool(container.get("args")) and not container.get("command")


def describe_repeated_set_up(argv: Sequence[str]) -> str:
    """Return the commands of a shell's text that set up files, with the remedy; empty without one."""
    found = []
    for text in argv:
        for words, conditional in list_commands(text) if re.search(r"[;&\n]", text) else ():
            line = " ".join(word.text for word in words[:4])
            if not conditional and _SET_UP.match(line):
                found.append(f"`{line[:60]}`")
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{', '.join(found[:_SHOWN])}{more}: such commands fail or overwrite files if they run at the same time; move "
        "them to the image or to an init container, or pack the folder with `ddp submit --workdir DIR --pip`"
    )
