"""The page with every table and figure of the five papers, made from the recorded results."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.text_files import UNPARSABLE, read_text
from holdfast_lab.provenance import source_tree
from holdfast_lab.study.missing import MISSING
from holdfast_lab.study.published import Verdict, between
from holdfast_lab.study.registry import Study

Key = tuple[str, str]  # the paper's table or figure, and the quantity
Cell = tuple[Mapping[str, Any], Mapping[str, Any]]  # a recorded row, and one of its comparisons
# Where a row without counts of a quantity has its number of trials.
_TRIALS = ("trials", "faults", "flips", "products", "fleets", "steps", "asked")
_NO_VERDICT = (Verdict.COMPARED, Verdict.NOT_HERE, Verdict.NOT_DONE)
_WORST_FIRST = (Verdict.UNEXPLAINED, Verdict.EXPLAINED, Verdict.UNDECIDED, Verdict.REPRODUCED)
_COLUMNS = "table or figure|quantity|theirs|ours|range|derived from|verdict|trials|date|code"
_HEAD = """\
# Reproduction: every table and figure of five papers

`holdfast study all` makes this page from the [recorded rows](../bench/results/studies); do not
edit it. With `--check` it exits with 1 if the page differs, or if a row was recorded by other code
than the present one (column *code*: a hash of all files that the study can execute). What the
studies are, and what they taught about the papers, is in [Studies](studies.md).

- **reproduced**: ours, or the 95 % interval of what we counted, overlaps a range that is derived
  from the paper: its rounding, the number of its trials, or the spread of its values; or the whole
  of it meets a bound that the paper states. **undecided**: only a part of it meets that bound.
- **differs, explained**: it does not, and a note says why; **differs, unexplained**: it does not.
- **calibration**: ours agrees, but the paper's value was an input of what we measured.
- **cannot fail**: ours agrees by construction, as where a clean copy stands for a recomputation.
- **compared**: the paper prints nothing from which a range follows, so that there is no verdict.
- **not possible on CPU**, **not done yet**: nothing was measured.

A line with several cells has the worst verdict of them, and says how many cells have which one.
Values "up to" are compared with our best case.
Rows without date and code were recorded before these were kept; their verdicts were made anew from
the recorded values.
"""


@dataclass(frozen=True)
class Record:
    """A recorded result of a study, with the file that holds it."""

    study: Study
    path: Path
    result: Mapping[str, Any]

    @property
    def current(self) -> bool:
        """Whether the present code recorded it."""
        code = self.result.get("code")
        return source_tree().state_of(self.study.module, code) == "current"

    @property
    def command(self) -> str:
        """The command that records it again."""
        full = ["--full"] if self.result.get("effort") == "full" else []
        return shlex.join(["holdfast", "study", self.study.name, *full, "--json", str(self.path)])

    def groups(self) -> dict[Key, list[Cell]]:
        """Return the comparisons by table or figure and quantity."""
        found: dict[Key, list[Cell]] = {}
        for row in self.result["rows"]:
            for quantity, one in row["published"].items():
                judged = one if one.get("verdict") else {**one, "verdict": Verdict.NOT_DONE}
                found.setdefault((one["source"], quantity), []).append((row, judged))
        return found


@dataclass(frozen=True)
class Line:
    """A line of the page: one quantity of a table or figure, over all its cells."""

    paper: str
    verdict: Verdict
    texts: tuple[str, ...]
    notes: tuple[str, ...] = ()


def read_records(studies: Iterable[Study], folder: Path) -> list[Record]:
    """Read the newest result of each study; of the same code the one of the paper's counts."""
    found = []
    for study in studies:
        paths = (folder / f"{study.name}{effort}.json" for effort in (".full", ""))
        records = [Record(study, path, read_result(path)) for path in paths if path.is_file()]
        if len({record.result.get("code") for record in records}) == 1:
            found.append(records[0])
        elif records:
            found.append(max(records, key=lambda record: str(record.result.get("date", ""))))
    return found


def read_result(path: Path) -> Mapping[str, Any]:
    """Read a result; raise a ConfigError if the file is damaged."""
    try:
        result = json.loads(read_text(path))
        return dict(result, rows=list(result["rows"]))
    except (*UNPARSABLE, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it, or run its study") from error


def lines_of(records: Sequence[Record]) -> list[Line]:
    """Make the lines of all records, and of what was not measured."""
    groups = [(one, key, cells) for one in records for key, cells in one.groups().items()]
    labels = Counter((_paper_of(one), key) for one, key, _ in groups)
    found = [
        _line(one, key, cells, named=labels[_paper_of(one), key] > 1) for one, key, cells in groups
    ]
    for paper, items in MISSING.items():
        for item, (verdict, why) in items.items():
            found.append(Line(paper, verdict, (item, why, *[""] * 4, verdict, *[""] * 3)))
    return found


def _paper_of(record: Record) -> str:
    return next(name for name in MISSING if record.study.paper.startswith(name))


def _line(record: Record, key: Key, cells: Sequence[Cell], *, named: bool) -> Line:
    """Make the line of a quantity; it names the study if another one measures the same."""
    item, quantity = key
    comparisons = [one for _, one in cells]
    verdict = joined(comparisons)
    measured = [float(r["measured"][quantity]) for r, _ in cells if quantity in r["measured"]]
    judged = [one for one in comparisons if one["verdict"] not in _NO_VERDICT] or comparisons[:1]
    sources = list(dict.fromkeys(one["range_source"] for one in judged))
    texts = (
        item,
        f"{quantity} ({record.study.name})" if named else quantity,
        _all([one["text"] for one in comparisons], [one["value"] for one in comparisons]),
        between(min(measured), max(measured)) if measured else "",
        _all([one["range"] for one in judged]),
        sources[0] if len(sources) == 1 else f"e.g. {sources[0]}",
        counted_verdicts(verdict, comparisons),
        _trials(cells, quantity),
        *(str(record.result.get(name, "")) for name in ("date", "code")),
    )
    notes = dict.fromkeys(one["explanation"] for one in comparisons if one["explanation"])
    return Line(record.study.paper, verdict, texts, tuple(notes))


def joined(comparisons: Sequence[Mapping[str, Any]]) -> Verdict:
    """Return the worst verdict of all cells; of a best case, the best one."""
    found = {Verdict(one["verdict"]) for one in comparisons}
    order = _WORST_FIRST[::-1] if comparisons[0]["best"] else _WORST_FIRST
    return next((one for one in order if one in found), min(found, key=list(Verdict).index))


def counted_verdicts(verdict: Verdict, comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Return a line's verdict; where cells have several, each one with its number of cells."""
    counts = Counter(Verdict(one["verdict"]) for one in comparisons)
    if counts.total() == 1:
        return verdict
    others = [
        f"{other}: {counts[other]}" for other in Verdict if counts[other] and other != verdict
    ]
    return "; ".join([f"{verdict}: {counts[verdict]} of {counts.total()}", *others])


def _all(texts: Sequence[str], values: Sequence[float | None] = ()) -> str:
    """Return the text of all cells, the range of their values, or that they differ."""
    if len(set(texts)) == 1:
        return texts[0]
    numbers = [value for value in values if value is not None]
    all_are = len(numbers) == len(texts)
    return between(min(numbers), max(numbers)) if all_are else "cell by cell"


def _trials(cells: Sequence[Cell], quantity: str) -> str:
    found = []
    for row, _ in cells:
        known = {**row["measured"], **row["case"], quantity: row.get("trials", {}).get(quantity)}
        names = (name for name in (quantity, *_TRIALS) if known.get(name))
        found += [int(known[name]) for name in names][:1]
    ends = sorted({min(found), max(found)}) if found else []
    return "–".join(f"{count:,}" for count in ends) + " a cell" * (len(cells) > 1 and bool(found))


def page(records: Sequence[Record], folder: Path) -> str:
    """Return the page as Markdown; the result of the mutations is read from the folder."""
    lines = lines_of(records)
    counts = Counter(line.verdict for line in lines)
    parts = [_HEAD, _table(("verdict", "lines"), [(one, str(counts[one])) for one in Verdict])]
    mutations = folder / "mutations.json"
    if mutations.is_file():
        found = read_result(mutations)
        parts.append(
            "Each method was broken in a plausible way (`tests/lab/study/test_mutations.py`, "
            f"{found['date']}): of {found['verdicts']} verdicts, {found['turned']} turned.\n"
        )
    for paper in MISSING:
        chosen = [line for line in lines if line.paper.startswith(paper)]
        parts += [f"## {paper}\n", *_paper(sorted(chosen, key=lambda line: _place(line.texts[0])))]
    return "\n".join(parts)


def _paper(lines: Sequence[Line]) -> Iterator[str]:
    notes: dict[str, int] = {}
    rows = []
    for line in lines:
        marks = [f" [{notes.setdefault(text, len(notes) + 1)}]" for text in line.notes]
        rows.append((*line.texts[:6], line.texts[6] + "".join(marks), *line.texts[7:]))
    yield _table(_COLUMNS.split("|"), rows)
    if notes:
        yield "".join(f"- [{number}] {text}.\n" for text, number in notes.items())


def _place(item: str) -> tuple[str, int, str]:
    """Sort appendices, figures, sections and tables, each by number."""
    kind, _, rest = item.partition(" ")
    digits = rest.partition(",")[0].partition(".")[0]
    return kind.rstrip("s"), int(digits) if digits.isdecimal() else 0, rest


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = (columns, ["---"] * len(columns), *rows)
    escaped = ([text.replace("|", "\\|") for text in row] for row in cells)
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)
