"""Readers of a campaign's files (journal, CSV, Parquet or summary) as cells and counts."""

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.report.sources import read_json
from holdfast.text_files import UNPARSABLE
from holdfast_lab.campaign import Cell, CellResult, Counts, check_parquet
from holdfast_lab.campaign.journal import JOURNAL_NAME
from holdfast_lab.campaign.results import CSV_NAME, PARQUET_NAME

COUNTED = tuple(item.name for item in fields(Counts) if item.name != "seconds")
SUMMARY_KEYS = {"plan", "cells", "total", "groups", "broken", "holds"}
_KEY_PARTS = 6


@dataclass(frozen=True)
class CampaignFiles:
    """The counts of the cells, or the sums of a summary; the planned number; the environment."""

    results: list[CellResult]
    planned: int
    environment: dict[str, object] = field(default_factory=dict)
    summary: dict[str, object] | None = None


def is_campaign(path: Path) -> bool:
    """Return whether a path is a campaign's directory or one of its result files."""
    if path.is_dir():
        return any((path / name).is_file() for name in (JOURNAL_NAME, CSV_NAME, PARQUET_NAME))
    return path.suffix in _READERS and path.is_file()


def read_campaign(path: Path) -> CampaignFiles:
    """Read a campaign's directory, by its journal, which is always complete, or one result file.

    Raises:
        ConfigError: The path cannot be read, or holds no results of a campaign.
    """
    if path.is_dir():
        path = next(
            path / name
            for name in (JOURNAL_NAME, CSV_NAME, PARQUET_NAME)
            if (path / name).is_file()
        )
    try:
        return _READERS[path.suffix](path)
    except (OSError, *UNPARSABLE, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise ConfigError(
            f"{path} holds no results of holdfast campaign ({type(error).__name__}: {error}); "
            "give its --out directory, or the file of its --json"
        ) from error


def cell_of(key: str) -> Cell:
    """Parse the key of a cell, as ``Cell.key`` makes it; raise ValueError for any other text."""
    parts = key.split("/")
    if len(parts) != _KEY_PARTS:
        raise ValueError(f"{key!r} is no cell")
    operator, dtype, sizes, distribution, site, fault = parts
    m, k, n = map(int, sizes.split("x"))
    return Cell(operator, dtype, (m, k, n), distribution, site, fault)


def counts_of(values: Mapping[str, Any]) -> Counts:
    """Read the counts of a row, whose values may be text, or raise KeyError or ValueError."""
    return Counts(**{name: int(values[name]) for name in COUNTED}, seconds=float(values["seconds"]))


def _journal(path: Path) -> CampaignFiles:
    """Read a journal; an incomplete last line belongs to an unfinished cell and is ignored."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    header, *lines = [json.loads(line) for line in whole.splitlines()]
    planned = int(header.pop("cells"))
    results = [CellResult(cell_of(line["cell"]), counts_of(line)) for line in lines]
    return CampaignFiles(results, planned, header)


def _rows(rows: Iterable[Mapping[str, Any]]) -> CampaignFiles:
    axes = ("distribution", "site", "fault")
    results = [
        CellResult(
            Cell(
                row["operator"],
                row["dtype"],
                (int(row["m"]), int(row["k"]), int(row["n"])),
                *(row[axis] for axis in axes),
            ),
            counts_of(row),
        )
        for row in rows
    ]
    if not results:
        raise ValueError("no rows")
    return CampaignFiles(results, len(results))


def _csv(path: Path) -> CampaignFiles:
    with path.open(newline="", encoding="utf-8") as file:
        return _rows(csv.DictReader(file))


def _parquet(path: Path) -> CampaignFiles:
    check_parquet()
    from pyarrow import ArrowException, parquet

    try:
        return _rows(parquet.read_table(path).to_pylist())
    except ArrowException as error:
        raise ValueError(str(error)) from error


def _summary(path: Path) -> CampaignFiles:
    values = read_json(path)
    if not isinstance(values, dict) or not values.keys() >= SUMMARY_KEYS:
        raise ValueError(f"not all of {', '.join(sorted(SUMMARY_KEYS))} are in it")
    environment = {"plan": values["plan"], "seed": values.get("seed")}
    return CampaignFiles([], int(values["cells"]), environment, values)


_READERS = {".jsonl": _journal, ".csv": _csv, ".parquet": _parquet, ".json": _summary}
