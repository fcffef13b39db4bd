"""No frame ends an SMP: random and damaged ones, of everybody who can send one."""

from pathlib import Path

import pytest

from bench.fuzz_frames import Fuzzer, Inside, Process, fuzz_inside

pytestmark = pytest.mark.timeout(120)

FRAMES, MANY, SENT = 1500, 20_000, 600


def test_no_frame_raises_in_the_smps_code(tmp_path: Path) -> None:
    row = fuzz_inside(tmp_path, FRAMES, seed=1)
    assert row["frames"] >= FRAMES
    assert row["internal_errors"] == 0
    assert FRAMES / 4 < row["refused"] <= row["frames"]
    assert min(count for name, count in row.items() if name.startswith("frames_")) > FRAMES / 6


@pytest.mark.fuzz
def test_memory_stays_bounded_whatever_comes(tmp_path: Path) -> None:
    row = fuzz_inside(tmp_path, MANY, seed=2)
    assert row["internal_errors"] == 0
    assert row["rss_mib_at_the_end"] < row["rss_mib_after_a_tenth"] + 32


def test_the_fuzzer_finds_an_unchecked_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside(tmp_path)

    def unchecked(asked: object) -> object:
        """What a reader of a slot is sent if its request is not looked at."""
        return {}, memoryview(bytes(100))[: asked.nbytes // asked.offset]  # type: ignore[attr-defined]

    monkeypatch.setattr(inside.server._reads, "_bytes", unchecked)
    try:
        with pytest.raises((ZeroDivisionError, IndexError)):
            Fuzzer(inside, 1).run(20 * FRAMES)
    finally:
        inside.close()


@pytest.mark.processes
def test_a_real_smp_survives_what_is_sent_over_its_sockets(tmp_path: Path) -> None:
    target = Process(tmp_path)
    try:
        Fuzzer(target, 3).run(SENT)
        status = target.status()
        assert status["pid"] == target.pid
        assert status["failures"] == 0
        assert status["refused"] > 0
        assert status["last_refusal"]
    finally:
        target.close()
