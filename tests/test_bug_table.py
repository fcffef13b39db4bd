"""The tables of bugs and of kinds of faults name tests that exist, and miss none."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUGS, KINDS = ROOT / "docs" / "bug_tests.md", ROOT / "docs" / "fault_kinds.md"
NUMBERS = {
    *(f"G{n}" for n in range(1, 17)),
    *(f"P{n}" for n in range(1, 16) if n != 10),  # the others belong to features to come
    *(f"S{n}" for n in (*range(1, 9), 11, 12, *range(15, 22))),
    *(f"U{n}" for n in (1, 3, 7, 9, 10)),
}
# lm_resiliency's FailureType, and nvidia_resiliency_ext's Fault with its health check.
FAULT_KINDS = re.findall(
    r"\w+",
    """
    tensor_corruption stale_state drop duplicate reorder delay hang timeout exception
    resource_exhaustion process_termination resource_unavailable checkpoint_corruption
    checkpoint_truncation checkpoint_missing io_error payload_corruption collective_desync
    message_drop network_partition config_drift GPU_ERROR GPU_SLEEP WORKLOAD_EXC ASYNC_EXC
    SIGNAL_EXC OS_ABORT LOCK_GIL SEGFAULT SIGINT SIGKILL SIGTERM SIGSTOP
    NVRX_INJECT_GPU_FAILURE
    """,
)


def rows_of(document: Path) -> list[list[str]]:
    """The cells of each row of a document's tables, without their headings."""
    lines = [line for line in document.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return [row for row in rows if row[0] not in ("bug", "number", "kind", "---")]


def named_in(cell: str) -> list[tuple[str, str]]:
    """Files and functions that a cell names; no function for a whole file."""
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", cell)


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of all functions of a file."""
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize(("document", "least"), [(BUGS, 150), (KINDS, 60)])
def test_every_named_test_exists(document: Path, least: int) -> None:
    named = [test for row in rows_of(document) for test in named_in(row[-1])]
    assert len(named) >= least
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or (name and name not in functions_of(path))
    ]
    assert missing == []


def test_every_bug_has_a_test() -> None:
    assert [row for row in rows_of(BUGS) if not named_in(row[-1])] == []


def test_every_number_has_a_row() -> None:
    numbers = [row[0] for row in rows_of(BUGS) if re.fullmatch(r"[A-Z]\d+", row[0])]
    assert sorted(NUMBERS - set(numbers)) == []
    assert len(numbers) == len(set(numbers))


def test_every_kind_of_fault_has_a_row_and_none_is_silent() -> None:
    rows = rows_of(KINDS)
    kinds = [name for row in rows for name in row[0].split(", ") if name]
    assert sorted(kinds) == sorted(FAULT_KINDS)
    for row in rows:
        _, where, outcome, _, seen, tests = row
        assert where
        assert seen
        assert outcome in ("survived", "refused") or outcome.startswith("not covered until "), row
        assert named_in(tests) or outcome.startswith("not covered until "), row
