"""Hashes of the files that a recorded result depends on: what they follow and when they change."""

import json
import shutil
from pathlib import Path

import pytest

from bench import rows
from holdfast.cli.main import main
from holdfast_lab import provenance, study
from holdfast_lab.cli import study as verb
from holdfast_lab.provenance import SourceTree

ROOT = Path(provenance.__file__).parents[1]
STUDY = "reft.survival"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources, in which files may be changed."""
    for name in ("holdfast", "holdfast_lab", "bench"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "*.js*")
        )
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "gemm.cpp").write_text("int one;")
    return tmp_path


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The last cell of the study's line in ``holdfast study list``."""
    capsys.readouterr()
    assert main(["study", "list", "--kept", str(folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if STUDY in line)
    return line.rstrip().rpartition("   ")[2].strip()


def test_a_kept_row_is_current_until_a_file_that_it_depends_on_changes(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = copy / "kept"
    kept.mkdir()
    for module in (provenance, verb):
        monkeypatch.setattr(module, "source_tree", lambda: SourceTree(copy))
    assert main(["study", STUDY, "--json", str(kept / f"{STUDY}.json")]) == 0
    assert listed(kept, capsys) == "current"
    (copy / "holdfast" / "snapshot" / "client.py").write_text("raise SystemExit\n")
    assert listed(kept, capsys) == "current"  # the study computes from formulas alone
    with (copy / "holdfast" / "planner" / "intervals.py").open("a") as file:
        file.write("broken = True\n")
    assert listed(kept, capsys) == "stale"
    old = json.loads((kept / f"{STUDY}.json").read_text())
    del old["code"]
    (kept / f"{STUDY}.json").write_text(json.dumps(old))
    assert listed(kept, capsys) == "no hash"


def test_imports_are_followed_to_the_module_that_defines_a_name(copy: Path) -> None:
    module = copy / "bench" / "made_up.py"
    for source, file, other in (
        ("from holdfast.replay import SpikeDetector", "replay/spikes.py", "replay/shadow.py"),
        ("import holdfast\nholdfast.protect", "protection.py", "screen/judge.py"),
        (
            'run("-m", "holdfast.snapshot.disk.persister")',
            "snapshot/disk/persister.py",
            "replay/spikes.py",
        ),
        ("def f():\n    from holdfast import events", "events/__init__.py", "guard.py"),
    ):
        module.write_text(source)
        files = SourceTree(copy).files_of("bench.made_up")
        assert copy / "holdfast" / file in files
        assert copy / "holdfast" / other not in files


def test_native_sources_and_data_files_count(copy: Path) -> None:
    source = copy / "csrc" / "gemm.cpp"
    for module, counts in (("bench.gemm", True), ("holdfast_lab.study.reft.intervals", False)):
        before = SourceTree(copy).hash_of(module)
        source.write_text(f"{source.read_text()}\nint {module.replace('.', '_')};")
        assert (SourceTree(copy).hash_of(module) != before) == counts
    kernels, targets = copy / "csrc" / "core" / "simd" / "vectors.h", copy / "setup.py"
    kernels.parent.mkdir(parents=True)
    for file in (kernels, targets):
        file.write_text("")
        assert file in SourceTree(copy).files_of("bench.digest")
    trainer = SourceTree(copy).files_of("holdfast_lab.cli.demo")
    assert any(path.suffix == ".toml" for path in trainer)


def test_comments_docstrings_and_empty_lines_change_no_hash(copy: Path) -> None:
    module, native = copy / "bench" / "made_up.py", copy / "csrc" / "gemm.cpp"
    module.write_text("from holdfast import _C\n\n\ndef f():\n    return '#'\n")
    before = SourceTree(copy).hash_of("bench.made_up")
    said = '"""Say\nmore."""\nfrom holdfast import _C  # core\n\n\ndef f():\n    """Return."""\n'
    module.write_text(f"{said}    return '#'\n")
    native.write_text("// One.\n\nint one;  /* and\nonly */\n")
    assert SourceTree(copy).hash_of("bench.made_up") == before
    module.write_text(f"{said}    return '##'\n")
    assert SourceTree(copy).hash_of("bench.made_up") != before


def test_every_study_and_every_bench_has_a_hash() -> None:
    tree = SourceTree(ROOT)
    modules = {one.module for one in study.REGISTRY.values()}
    modules |= {name for name in tree.modules if name.startswith("bench.")}
    assert all(len(tree.hash_of(name)) == 2 * provenance.HASH_BYTES for name in modules)


def test_a_bench_row_names_its_module_and_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    names = {"__spec__": type("Spec", (), {"name": "bench.gemm"}), "record": rows.record}
    exec("record('made_up', {'ratio': 1.0})", names)
    row = json.loads((tmp_path / "made_up.jsonl").read_text())
    assert row["module"] == "bench.gemm"
    assert row["code"] == SourceTree(ROOT).hash_of("bench.gemm")
    assert rows.states() == {"made_up": "current"}
    (tmp_path / "made_up.jsonl").write_text(json.dumps(row | {"code": "00"}))
    assert rows.states() == {"made_up": "stale"}
