"""`ddp completion`: print a script for bash, zsh or fish with all commands and flags. It calls no cluster."""

import argparse
from typing import Final

from ddp_operator.cli.io import ExitCode
from ddp_operator.terminal import print_text

SHELLS: Final = ("bash", "zsh", "fish")
_BASH: Final = """\
_ddp() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command= word words=
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in -*) ;; *) command=$word; break ;; esac
    done
    case $command in
{cases}
        *) words="{commands}" ;;
    esac
    if [[ $command != "" && $current != -* ]]; then words=; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ $command != "" && $current != -* ]]; then COMPREPLY+=($(compgen -f -- "$current")); fi
}}
complete -o filenames -F _ddp ddp
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
    parser.epilog = "For the current shell: source <(ddp completion bash). To keep it, add that line to ~/.bashrc."


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print_text(build_script(arguments.shell, describe_commands()), end="")
    return ExitCode.OK


def describe_commands() -> dict[str, tuple[str, dict[str, str]]]:
    """Return every command with its help text and its flags, each with its help text."""
    from ddp_operator.cli import COMMANDS, build_parser

    parser, _ = build_parser(*(name for name, _, _ in COMMANDS))
    actions = parser._subparsers._group_actions if parser._subparsers else []
    choices = dict(actions[0].choices or {})
    return {name: (help_text, _flags(choices[name])) for name, _, help_text in COMMANDS}


def _flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    return {flag: action.help or "" for action in parser._actions for flag in action.option_strings}


def build_script(shell: str, commands: dict[str, tuple[str, dict[str, str]]]) -> str:
    """Return the script for one shell."""
    if shell == "fish":
        condition = "__fish_use_subcommand"
        lines = [
            f"complete -c ddp -n {condition} -f -a {name} -d {_quote(text)}" for name, (text, _) in commands.items()
        ]
        for name, (_, flags) in commands.items():
            for flag, text in flags.items():
                option = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                lines.append(f"complete -c ddp -n '__fish_seen_subcommand_from {name}' {option} -d {_quote(text)}")
        return "\n".join(lines) + "\n"
    cases = "\n".join(f'        {name}) words="{" ".join(flags)}" ;;' for name, (_, flags) in commands.items())
    script = _BASH.format(cases=cases, commands=" ".join(commands))
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
