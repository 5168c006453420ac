"""The features of the commands. Each is a folder here and an entry of this tuple; the kernel knows none of them."""

from typing import Final

from ddp_cli.client.hooks import Command, CommandFeature

FEATURES: Final[tuple[CommandFeature, ...]] = (
    CommandFeature(
        name="check",
        maturity="beta",
        page="check.md",
        commands=(
            Command(
                name="check",
                module="ddp_cli.features.check.command",
                help="check whether a script trains as one job and resumes exactly",
                after="run",
                script="file",
            ),
        ),
    ),
    CommandFeature(
        name="ui",
        maturity="beta",
        page="ui.md",
        commands=(
            Command(
                name="ui",
                module="ddp_cli.features.ui.command",
                help="show jobs and runs in the browser",
                after="watch",
            ),
            Command(
                name="report",
                module="ddp_cli.features.ui.report_command",
                help="save the page of a run or job as one HTML file",
                after="render",
            ),
        ),
        reports="ddp_cli.features.ui.pages",
    ),
    CommandFeature(
        name="profiles",
        maturity="stable",
        page="profiles.md",
        commands=(
            Command(
                name="profile",
                module="ddp_cli.features.profiles.command",
                help="list the profiles of a cluster, or show what one sets",
                after="render",
            ),
        ),
    ),
    CommandFeature(
        name="convert",
        maturity="stable",
        page="comparison.md",
        commands=(
            Command(
                name="convert",
                module="ddp_cli.features.convert.command",
                help="convert a Kubeflow PyTorchJob to a DDPTrainingJob",
                after="render",
            ),
        ),
    ),
    CommandFeature(
        name="dev",
        maturity="beta",
        page="dev.md",
        commands=(
            Command(
                name="dev",
                module="ddp_cli.features.dev.command",
                help="start a job whose pods stay, for runs with changed code within seconds",
                after="submit",
                script="file",
            ),
            Command(
                name="rerun",
                module="ddp_cli.features.dev.command",
                help="bring the folder to the pods of ddp dev, and run it there",
                after="submit",
                script="arguments",
            ),
            Command(
                name="release",
                module="ddp_cli.features.dev.command",
                help="end the pods of ddp dev",
                after="submit",
            ),
        ),
        former_runs="ddp_cli.features.dev.former_runs",
    ),
    CommandFeature(
        name="drill",
        maturity="stable",
        page="drills.md",
        commands=(
            Command(
                name="drill",
                module="ddp_cli.features.drill.command",
                help="kill a rank of a running job and measure the recovery",
                after="delete",
            ),
        ),
    ),
    CommandFeature(
        name="mcp",
        maturity="experimental",
        page="python.md",
        commands=(
            Command(
                name="mcp",
                module="ddp_cli.features.mcp.command",
                help="serve the jobs to an assistant over the Model Context Protocol",
                after="delete",
            ),
        ),
    ),
)
