"""``holdfast study``: measure a table or figure of a paper again, beside the paper's values."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from difflib import get_close_matches
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from holdfast import __version__
from holdfast.cli.plots import check_drawable, save
from holdfast.cli.tables import check_writable, print_table, write_json
from holdfast.errors import ConfigError
from holdfast.inject.journal import Journal
from holdfast.text_files import UNPARSABLE, read_text
from holdfast_lab import study
from holdfast_lab.provenance import NO_HASH, provenance, source_tree
from holdfast_lab.study.published import between, shown
from holdfast_lab.study.registry import Progress, Row, Settings, Study
from holdfast_lab.study.reproduction import page, read_records

LIST, ALL = "list", "all"
ROOT = Path(__file__).parents[2]
KEPT, PAGE = ROOT / "bench" / "results" / "studies", ROOT / "docs" / "reproduction.md"


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb ``study`` to the command line."""
    parser = subparsers.add_parser(
        "study",
        description="Run a study of a paper again and print the paper's values beside ours. "
        "Exit code 1 if our own method breaks the claim that the study is about.",
    )
    add = parser.add_argument
    others = f"{LIST!r} for all of them, {ALL!r} to write docs/reproduction.md"
    add("name", metavar="NAME", help=f"a study, or {others}")
    check = "with 'all': exit code 1 if a result is stale or the page differs; write nothing"
    add("--check", action="store_true", help=check)
    add("--full", action="store_true", help="the paper's counts, which may take an hour")
    add("--seed", metavar="N", type=int, default=0, help="of the operands and faults (default 0)")
    threads = "of torch (default 1, at which small products are soonest done; --full likes more)"
    add("--threads", metavar="N", type=int, default=1, help=threads)
    resume = "keep finished cells in FILE, and go on with those that a former call left there"
    add("--resume", metavar="FILE", type=Path, help=resume)
    add("--plot", metavar="FILE", type=Path, help="also draw it: .png, .svg or .pdf")
    add("--json", metavar="FILE", type=Path, help="also write everything to FILE")
    export = "also write what other verbs read, e.g. `holdfast plan attention --phi FILE`"
    add("--export", metavar="FILE", type=Path, help=export)
    kept = "results that `list` and `all` read (default: those of this checkout)"
    add("--kept", metavar="DIR", type=Path, default=KEPT, help=kept)
    add("--page", metavar="FILE", type=Path, default=PAGE, help="page that `all` writes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List the studies or run one; return 1 if holdfast's own method breaks its claim, else 0."""
    check_writable(args.json)
    if args.check and args.name != ALL:
        raise ConfigError(f"--check goes with {ALL!r}")
    if args.name in (LIST, ALL):
        for option in ("plot", "export", "resume"):
            if getattr(args, option) is not None:
                raise ConfigError(f"--{option} goes with a study, not with {args.name!r}: name one")
        if not args.kept.is_dir():
            raise ConfigError(f"there is no folder {args.kept}: give --kept one of kept results")
        return _list(args) if args.name == LIST else _all(args)
    chosen, settings = _find(args.name), _settings(args)
    _check_plot(chosen, args.plot)
    _check_export(chosen, args.export)
    if args.resume is not None and not _is_resumable(chosen):
        can = ", ".join(one.name for one in study.REGISTRY.values() if _is_resumable(one))
        raise ConfigError(f"{chosen.name} cannot be resumed, only {can}: leave out --resume")
    began = time.monotonic()
    with _threads(args.threads), _progress() as progress:
        rows = _rows(chosen, settings, args, progress)
    seconds = time.monotonic() - began
    print_study(chosen, rows)
    broken = chosen.verdict(rows)
    if broken:
        print(f"BROKEN: {broken}")
    counts = "the paper's counts" if args.full else "reduced; --full for the paper's counts"
    print(f"{len(rows)} rows in {seconds:.1f} s ({counts})")
    if args.plot is not None:
        draw(chosen, rows, args.plot)
    if args.export is not None and chosen.export is not None:
        write_json(args.export, chosen.export(rows))
    if args.json is not None:
        circumstances = {"seconds": seconds, "threads": args.threads, "broken": broken}
        write_json(args.json, circumstances | as_json(chosen, settings, rows))
    return 1 if broken else 0


def _rows(
    chosen: Study, settings: Settings, args: argparse.Namespace, progress: Progress
) -> list[Row]:
    """Run a study, with the cells that the journal of ``--resume`` holds."""
    if args.resume is None:
        return list(chosen.run(settings, progress))
    run: Callable[..., Iterator[Row]] = chosen.run
    header = provenance(chosen.module) | {"effort": settings.effort, "seed": settings.seed}
    with closing(Journal(args.resume, header | {"threads": args.threads})) as journal:
        return list(run(settings, progress, journal))


def _is_resumable(chosen: Study) -> bool:
    return "journal" in signature(chosen.run).parameters


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _settings(args: argparse.Namespace) -> Settings:
    if args.seed < 0:
        raise ConfigError(f"seed = {args.seed} must be at least 0")
    if args.threads < 1:
        raise ConfigError(f"threads = {args.threads} must be at least 1")
    return Settings("full" if args.full else "reduced", args.seed)


def _check_plot(chosen: Study, path: Path | None) -> None:
    """Check that the plot can be drawn and saved, before the study spends time on measuring."""
    if path is None:
        return
    if chosen.plot is None:
        raise ConfigError(f"{chosen.name} has no plot, its table says it all; leave out --plot")
    check_drawable(path)


def _check_export(chosen: Study, path: Path | None) -> None:
    check_writable(path)
    if path is not None and chosen.export is None:
        raise ConfigError(f"no other verb reads of {chosen.name}; leave out --export, or --json")


def _list(args: argparse.Namespace) -> int:
    columns = ("name", "paper", "reproduces", "kept rows")
    rows = [
        (one.name, one.paper, one.reproduces, ", ".join(kept_rows(one, args.kept)))
        for one in study.REGISTRY.values()
    ]
    print_table(columns, rows)
    print(NO_HASH)
    if args.json is not None:
        write_json(args.json, [dict(zip(columns, row, strict=True)) for row in rows])
    return 0


def _all(args: argparse.Namespace) -> int:
    """Write the page of all results, or compare it with the one that is there."""
    records = read_records(study.REGISTRY.values(), args.kept)
    text = page(records, args.kept)
    if not args.check:
        args.page.write_text(text, encoding="utf-8")
        print(f"{args.page}: {len(records)} studies")
        return 0
    old = [record for record in records if not record.current]
    for record in old:
        print(f"stale, run: {record.command}")
    if args.page.is_file() and read_text(args.page) == text:
        if not old:
            print(f"{args.page} is what {len(records)} results of the present code give")
        return int(bool(old))
    print(f"{args.page} is not what the results give, run: holdfast study {ALL}")
    return 1


def kept_rows(chosen: Study, folder: Path) -> list[str]:
    """Compare each kept result of a study with the present code.

    Results are the files ``NAME.json`` and ``NAME.full.json`` of ``folder``. Each is ``"current"``,
    ``"stale"`` or ``"no hash"``, preceded by ``"full: "`` if it has the paper's counts.
    """
    found = []
    for name, effort in ((f"{chosen.name}.json", ""), (f"{chosen.name}.full.json", "full: ")):
        path = folder / name
        if path.is_file():
            found.append(effort + source_tree().state_of(chosen.module, _recorded(path)))
    return found


def _recorded(path: Path) -> Any:
    """Return the hash of the code that made a kept result, if it has one."""
    try:
        return json.loads(read_text(path)).get("code")
    except (*UNPARSABLE, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it, or run its study") from error


def _find(name: str) -> Study:
    if name in study.REGISTRY:
        return study.REGISTRY[name]
    close = get_close_matches(name, study.REGISTRY, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"there is no study {name!r}; {hint}`holdfast study {LIST}` names them all")


class _Watched:
    """A progress bar with the remaining time."""

    def __init__(self, bars: Bars, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def begin(self, total: float) -> None:
        self._bars.update(self._task, total=total)

    def advance(self, amount: float) -> None:
        self._bars.advance(self._task, amount)


@contextmanager
def _progress() -> Iterator[_Watched]:
    columns = (TextColumn("study"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        yield _Watched(bars, bars.add_task("study", total=None))


def print_study(chosen: Study, rows: Sequence[Row]) -> None:
    """Print a table for each heading, with the paper's values in separate columns."""
    print(f"{chosen.name} · {chosen.paper}\n{chosen.reproduces}")
    notes: dict[str, int] = {}
    for (heading, *_), group in groupby(rows, _shape):
        _print_group(heading, list(group), notes)
    for text, number in notes.items():
        print(f"[{number}] {text}")


def _shape(row: Row) -> tuple[Any, ...]:
    return row.table, tuple(row.case)


def _print_group(heading: str, rows: Sequence[Row], notes: dict[str, int]) -> None:
    cases = list(rows[0].case)
    quantities = list(dict.fromkeys(q for row in rows for q in (*row.measured, *row.published)))
    sources = {quantity: _source(rows, quantity) for quantity in quantities}
    one = len({source for source in sources.values() if source}) == 1
    columns, right = list(cases), []
    for quantity in quantities:
        right.append(quantity)
        if sources[quantity]:
            right.append("paper" if one else f"paper, {sources[quantity]}")
    columns += right
    columns += ["verdict"] * any(row.published for row in rows)
    columns += ["note"] * any(row.note for row in rows)
    cells = [_cells(row, quantities, sources, columns, notes) for row in rows]
    source = f" (paper: {max(sources.values())})" if one else ""
    print_table(columns, cells, title=heading + source, right=right)


def _cells(
    row: Row,
    quantities: Sequence[str],
    sources: Mapping[str, str],
    columns: Sequence[str],
    notes: dict[str, int],
) -> list[str]:
    cells = [str(value) for value in row.case.values()]
    for quantity in quantities:
        cells.append(_cell(row, quantity))
        if sources[quantity]:
            cells.append(row.published[quantity].text if quantity in row.published else "")
    cells += [_verdict(row, notes)] * ("verdict" in columns)
    return cells + [row.note] * ("note" in columns)


def _source(rows: Sequence[Row], quantity: str) -> str:
    found = [row.published[quantity].source for row in rows if quantity in row.published]
    return " and ".join(dict.fromkeys(found))


def _cell(row: Row, quantity: str) -> str:
    if quantity not in row.measured:
        return ""
    text = shown(row.measured[quantity])
    if quantity in row.intervals:
        text += f" ({between(*row.intervals[quantity])})"
    return text


def _verdict(row: Row, notes: dict[str, int]) -> str:
    """Return the verdicts of a row, each with its quantity, or the one that all quantities have.

    Those that differ have their explanation as a note.
    """
    differing, texts = row.differing(), []
    for quantity, verdict in row.verdicts.items():
        why = row.published[quantity].otherwise if quantity in differing else ""
        texts.append(f"{verdict} [{notes.setdefault(why, len(notes) + 1)}]" if why else verdict)
    if len(set(texts)) <= 1:
        return "".join(texts[:1])
    return "; ".join(f"{name}: {text}" for name, text in zip(row.verdicts, texts, strict=True))


def draw(chosen: Study, rows: list[Row], path: Path) -> None:
    """Draw the rows into a file."""
    from matplotlib.figure import Figure

    assert chosen.plot is not None
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    chosen.plot(rows, figure)
    save(figure, path)


def as_json(chosen: Study, settings: Settings, rows: Sequence[Row]) -> dict[str, object]:
    """Return all measurements of the study, with its conditions, as values that JSON can hold."""
    return {
        "study": chosen.name,
        "paper": chosen.paper,
        "reproduces": chosen.reproduces,
        "effort": settings.effort,
        "seed": settings.seed,
        "date": datetime.now(UTC).date().isoformat(),
        **provenance(chosen.module),
        "holdfast": __version__,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "rows": [row.as_dict() for row in rows],
    }
