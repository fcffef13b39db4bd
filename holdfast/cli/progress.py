"""Live progress on the terminal: of a share of work done, or of a training run and its faults."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from holdfast.events import Event, EventKind

SPARKS = "▁▂▃▄▅▆▇█"


@contextmanager
def share_progress(text: str) -> Iterator[Callable[[float, str], None]]:
    """Show a bar on standard error, if that is a terminal, until the context ends.

    Args:
        text: what is being done at first.

    Yields:
        A function to call with the share that is done, 0 to 1, and what is being done now.
    """
    console = Console(stderr=True)
    words = TextColumn("{task.description:10}")
    columns = (words, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(text, total=1.0)
        yield lambda share, now: progress.update(task, completed=share, description=now)


class TrainingProgress:
    """The bar of one training run; call it with the losses by step and the new events."""

    def __init__(self, progress: Progress, label: str, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=steps, loss="starting")

    def __call__(self, losses: dict[int, float], events: list[Event]) -> None:
        """Print new events and move the bar to the newest step."""
        for event in events:
            self._progress.console.print(
                describe(event), highlight=False, markup=False, soft_wrap=True
            )
        if losses:
            step = max(losses)
            self._progress.update(
                self._task, completed=len(losses), loss=f"loss {losses[step]:.4f}"
            )


def describe(event: Event) -> str:
    """Describe an event in one line for a person who watches."""
    when = f"step {event.step:>3}" if event.step >= 0 else "at start"
    where = f"{when} rank {event.rank}" if event.rank >= 0 else when
    if event.kind == EventKind.INJECTED:
        what = event.detail["kind"] + (
            f" bit {event.detail['bit']}" if event.detail["bit"] is not None else ""
        )
        return f"  ⚡ {where}  {what} in {event.op or 'the process'} ({event.detail['site']})"
    mark = "✓" if event.rung else "!"
    rung = f" → {event.rung}" if event.rung else ""
    seen = f" seen by {event.detector}" if event.detector else ""
    return f"  {mark} {where}  {event.kind}{seen}{rung}  {event.op}"


@contextmanager
def training_progress(console: Console) -> Iterator[Progress]:
    """Show progress on the console; plain lines where it is not a terminal."""
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield progress


def sparkline(losses: dict[int, float], width: int = 60) -> str:
    """Draw a loss curve in one line of text; non-finite values show as ×."""
    values = [losses[step] for step in sorted(losses)]
    values = values[:: max(1, -(-len(values) // width))]
    finite = [v for v in values if abs(v) < float("inf")]
    if not finite:
        return "×" * len(values)
    low, high = min(finite), max(finite)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        SPARKS[round((v - low) * scale)] if abs(v) < float("inf") else "×" for v in values
    )
