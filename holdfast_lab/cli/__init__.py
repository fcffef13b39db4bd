"""The command-line verbs of the laboratory: demo, train, study and campaign."""

from typing import Any

from rich.console import Console

from holdfast.logs import printable


def say(console: Console, text: str, **settings: Any) -> None:
    """Print lines as they are: without highlighting, markup, breaks or what a terminal obeys."""
    shown = "\n".join(map(printable, text.split("\n")))
    console.print(shown, highlight=False, markup=False, soft_wrap=True, **settings)
