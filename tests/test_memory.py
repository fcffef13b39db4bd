"""How much memory is left: of the machine, and of the control groups."""

from pathlib import Path

import pytest

from holdfast import memory


def test_available_memory_is_bounded_by_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group(path: str, **files: str) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / path / name.replace("__", ".")).write_text(text)

    group("a/b", memory__max="max", memory__current="5", memory__stat="inactive_file 0")
    group("a", memory__max="1000000", memory__current="400000", memory__stat="inactive_file 50000")
    (tmp_path / "cgroup").write_text("0::/a/b\n9:cpu:/x\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_PROC_CGROUP", tmp_path / "cgroup")
    assert memory.available_bytes() == 650_000
    limits = {"limit_in_bytes": "900000", "usage_in_bytes": "500000"}
    group("memory/j", **{f"memory__{name}": text for name, text in limits.items()})
    group("memory/j", memory__stat="total_inactive_file 100000")
    (tmp_path / "cgroup").write_text("4:cpu,memory:/j\n")
    assert memory.available_bytes() == 500_000


def test_without_a_kernel_that_says_it_is_all_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = memory.available_bytes()
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory, "_PROC_CGROUP", tmp_path / "none")
    assert memory.available_bytes() >= known > 0
