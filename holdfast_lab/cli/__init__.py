"""The command-line verbs of the laboratory: demo, train, study and campaign."""

from typing import Any

from rich.console import Console


def say(console: Console, text: str, **settings: Any) -> None:
    """Print a text without highlighting and without breaking its lines."""
    console.print(text, highlight=False, soft_wrap=True, **settings)
