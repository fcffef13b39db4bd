"""Progress bars for the terminal, of any work or of a training run with its events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from holdfast.events import Event, EventKind
from holdfast.report import timeline

SPARKS = "▁▂▃▄▅▆▇█"


@contextmanager
def share_progress(text: str) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on standard error, if that is a terminal, until the context ends.

    The context's value is a function to call with the share that is done, from 0 to 1, and a text.
    """
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(text, total=1.0)
        yield lambda share, now: progress.update(task, completed=share, description=now)


class TrainingProgress:
    """The bar of a training run, to be called with its losses by step and its new events."""

    def __init__(self, progress: Progress, label: str, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=steps, loss="starting")

    def __call__(self, losses: dict[int, float], events: list[Event]) -> None:
        """Print new events and move the bar to the newest step."""
        for event in events:
            show = self._progress.console.print
            show(describe(event), highlight=False, markup=False, soft_wrap=True)
        if losses:
            loss = f"loss {losses[max(losses)]:.4f}"
            self._progress.update(self._task, completed=len(losses), loss=loss)


def describe(event: Event) -> str:
    """Describe an event in one line, after a mark: ⚡ a fault injected, ✓ one repaired."""
    mark = "⚡" if event.kind == EventKind.INJECTED else "✓" if event.rung else "!"
    return f"  {mark} {timeline.describe(event)}" + (f" → {event.rung}" if event.rung else "")


def training_progress(console: Console) -> Progress:
    """Make the progress of training runs, a context; plain lines if it is no terminal."""
    bar = (BarColumn(), MofNCompleteColumn(), "{task.fields[loss]}", TimeElapsedColumn())
    return Progress("{task.description:8}", *bar, console=console, refresh_per_second=4)


def sparkline(losses: dict[int, float], width: int = 60) -> str:
    """Draw a loss curve in one line of text, in which × stands for values that are not finite."""
    values = [losses[step] for step in sorted(losses)]
    values = values[:: max(1, -(-len(values) // width))]
    finite = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((v - low) * scale)] if isfinite(v) else "×" for v in values)
