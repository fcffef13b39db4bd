"""The table of bugs names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "bug_tests.md"


def named_tests() -> list[tuple[str, str]]:
    """Files and functions that the table's second column names; no function for a whole file."""
    lines = TABLE.read_text().splitlines()
    rows = [
        line for line in lines if line.startswith("| ") and not line.startswith(("| bug", "| ---"))
    ]
    found = [re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", row.split(" | ")[-1]) for row in rows]
    assert all(found), [row for row, tests in zip(rows, found, strict=True) if not tests]
    return [test for tests in found for test in tests]


def test_every_bug_has_a_test_that_exists() -> None:
    named = named_tests()
    assert len(named) >= 80
    missing = []
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).exists() else ast.Module([])
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        whole_file = not name and (ROOT / path).exists()
        missing += [] if whole_file or name in defined else [f"{path}::{name}"]
    assert missing == []
