"""The parser of the command line."""

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from holdfast.logs import printable


class Parser(argparse.ArgumentParser):
    """A parser whose error messages show what a terminal would otherwise obey."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, after the usage and one line with the reason."""
        super().error(printable(message))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Python 3.11 takes the value of "--option=--" for no value at all, an empty list.
        if arg_strings == ["--"] and action.option_strings and action.nargs in (None, "?"):
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of a command, which its verbs will have as well."""
    return Parser(prog=name, description=description)


def deferred(module: str, function: str = "run") -> Callable[[argparse.Namespace], int]:
    """Return a verb's work, whose module, which needs torch, is imported when the verb is run."""

    def work(args: argparse.Namespace) -> int:
        code: int = getattr(import_module(f"holdfast.cli.{module}"), function)(args)
        return code

    return work
