"""``holdfast completion``: let a shell complete verbs, options and files, by argcomplete."""

import argparse
import os
from collections.abc import Callable

from holdfast.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
REQUEST_VARIABLE = "_ARGCOMPLETE"  # set by the shell, which wants completions of COMP_LINE


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``completion`` to the command line."""
    parser = subparsers.add_parser(
        "completion",
        description="Print the lines that let a shell complete the verbs and options of holdfast, "
        'for its start-up file: eval "$(holdfast completion bash)", or for fish: '
        "holdfast completion fish | source. Needs: pip install 'torch-holdfast[completion]'.",
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the shell's lines and return 0."""
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as error:
        raise ConfigError(
            "completion needs argcomplete: pip install 'torch-holdfast[completion]'"
        ) from error
    print(shellcode(["holdfast"], shell=args.shell))
    return 0


def complete(make_parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """If a shell asks for completions, print them and end the process."""
    if REQUEST_VARIABLE not in os.environ:
        return
    from argcomplete import autocomplete

    words = os.environ.get("COMP_LINE", "").split()
    autocomplete(make_parser(words[1] if len(words) > 1 else ""))
