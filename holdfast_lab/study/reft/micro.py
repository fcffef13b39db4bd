"""``reft.micro``: the speed of each step of a save alone, by bucket size (figure 9)."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from holdfast.digest import Hasher
from holdfast.snapshot.parity import erasure_code
from holdfast.snapshot.parity.isal import Bytes
from holdfast_lab.study.plots import line
from holdfast_lab.study.reft import paper
from holdfast_lab.study.reft.saving import raw_write_s, seconds, torch_save_s
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study

BUCKETS = "one thread, by bucket"
WHOLE = "one thread, in one piece"
SHARED, FRESH = "shared memory, GB/s", "untouched shared memory, GB/s"
DIGESTED, PARITY, DISK = "digested too, GB/s", "parity of 3, GB/s", "disk, GB/s"
SERIALISED, OVER_DISK = "torch.save to disk, GB/s", "shared memory / disk"
_KIB, _MIB = 2**10, 2**20
_BLOCKS = 3
_FRESH_NOTE = "a slot's pages are touched when it is made, so that no save pays for it"


def _run(settings: Settings, progress: Progress) -> Iterator[Row]:
    nbytes = settings.choose(3 * _MIB, 192 * _MIB, 1536 * _MIB)
    sizes = settings.choose([64 * _KIB, _MIB], *2 * [[64 * _KIB * 4**n for n in range(6)]])
    progress.begin(float(len(sizes) + 1))
    source = torch.empty(nbytes // 4).uniform_(generator=settings.generator("micro"))
    raw: Bytes = source.view(torch.uint8).numpy()
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            yield _bucketed(raw, size, Path(folder))
            progress.advance(1)
        yield _whole(raw, Path(folder))
        progress.advance(1)


def _bucketed(raw: Bytes, size: int, folder: Path) -> Row:
    shared, parities = _shared(len(raw)), np.full(size, 1, np.uint8)
    spans = [slice(start, start + size) for start in range(0, len(raw), size)]
    triples = list(zip(*[iter(spans)] * _BLOCKS, strict=False))

    def copy() -> None:
        for span in spans:
            np.copyto(shared[span], raw[span])

    def copy_and_digest() -> None:
        for span in spans:
            Hasher().copy(raw[span], shared[span])

    def encode() -> None:
        for triple in triples:
            erasure_code.encode(0, parities, [raw[span] for span in triple])

    runs: dict[str, Callable[[], None]] = {SHARED: copy, DIGESTED: copy_and_digest}
    measured = {name: _speed(len(raw), seconds(run)) for name, run in runs.items()}
    if triples:
        measured[PARITY] = _speed(_BLOCKS * size * len(triples), seconds(encode))
    measured[DISK] = _speed(len(raw), raw_write_s(folder, len(raw), size))
    measured[OVER_DISK] = measured[SHARED] / measured[DISK]
    case: Case = {"bucket, KiB": size // _KIB, "MB": round(len(raw) / 1e6)}
    return Row(BUCKETS, case, measured, {OVER_DISK: paper.SHARED_MEMORY_OVER_IO})


def _whole(raw: Bytes, folder: Path) -> Row:
    shared = _shared(len(raw))

    def copy_to_fresh() -> None:
        np.copyto(_mapped(len(raw)), raw)

    measured = {
        SHARED: _speed(len(raw), seconds(lambda: np.copyto(shared, raw))),
        FRESH: _speed(len(raw), seconds(copy_to_fresh)),
        SERIALISED: _speed(len(raw), torch_save_s(folder, len(raw))),
    }
    return Row(WHOLE, {"MB": round(len(raw) / 1e6)}, measured, note=_FRESH_NOTE)


def _mapped(nbytes: int) -> Bytes:
    fd = os.memfd_create("holdfast-study", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    finally:
        os.close(fd)


def _shared(nbytes: int) -> Bytes:
    found = _mapped(nbytes)
    found[:] = 1
    return found


def _speed(nbytes: int, taken_s: float) -> float:
    return nbytes / taken_s / 1e9


def _plot(rows: list[Row], figure: Figure) -> None:
    """Plot the speed of each step over the size of a bucket."""
    axes = figure.subplots()
    found = [row for row in rows if row.table == BUCKETS]
    for name in (SHARED, DIGESTED, PARITY, DISK):
        line(axes, found, "bucket, KiB", name, "o-", label=name.removesuffix(", GB/s"))
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="bucket, KiB", ylabel="GB/s")
    axes.legend(fontsize="small")


STUDY = Study(
    name="reft.micro",
    paper="REFT, section 6.2, figure 9",
    reproduces="how fast the steps of a save are, each alone: tensors to shared memory, digests, "
    "parity, disk, by bucket size",
    run=_run,
    plot=_plot,
)
