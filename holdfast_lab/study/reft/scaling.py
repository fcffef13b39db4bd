"""``reft.weak-scaling``, ``reft.strong-scaling``: saving speed over more nodes (figures 10, 11)."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast_lab.study.plots import line
from holdfast_lab.study.reft import opt, paper
from holdfast_lab.study.reft.opt import Opt, training_state
from holdfast_lab.study.reft.saving import (
    Group,
    at_once_s,
    raw_write_s,
    room_for,
    torch_save_s,
    whole_s,
)
from holdfast_lab.study.registry import Case, Figure, Progress, Row, Settings, Study

ALONE = "data-parallel paths, each run alone and counted as parallel"
AT_ONCE = "two paths at once, as two processes of this machine"
DISK = "against one disk that all paths share"
STAGES = "pipeline stages, each run alone and counted as parallel"
SAVED, SCALING = "with parity, GB/s", "with parity / 1 path"
SHARD, SHARD_SCALING = "shards alone, GB/s", "shards alone / 1 path"
COPIED = "read by a node, × state"
SPEED, OVER_ONE, LARGEST = "GB/s", "/ 1 stage", "largest stage, × mean"
SECONDS = "seconds"
OVER_RAW, OVER_SAVE = "/ raw writes", "/ torch.save"
PATHS = (1, 2, 4, 6, 12, 24)
COMPARED_PATHS = 24
STAGE_COUNTS = (1, 2, 4, 6)
_ALONE_NOTE = (
    "simulated parallelism: every node's work is done here, one after another, with the machine "
    "to itself; the slowest counts; no network is needed to save"
)
_SHARED_NOTE = "real processes, but they share one machine's memory bandwidth, as nodes do not"
_DISK_NOTE = "the disk at its full speed, as if sharded writes shared it without loss"


def _models(settings: Settings) -> list[Opt]:
    return settings.choose([opt.TINY], [opt.OPT_125M], [opt.OPT_125M, opt.OPT_350M])


def _weak(settings: Settings, progress: Progress) -> Iterator[Row]:
    models = _models(settings)
    progress.begin(float(len(models) * (len(PATHS) + 2)))
    for model in models:
        # Memory for the state, every node's buffer, and copies of shards.
        lacking = room_for(4 * model.state_bytes)
        if lacking:
            progress.advance(len(PATHS) + 2)
            yield Row(ALONE, {"model": model.name}, note=f"not measured: {lacking}")
            continue
        yield from _weak_of(model, settings, progress)


def _weak_of(model: Opt, settings: Settings, progress: Progress) -> Iterator[Row]:
    flat = training_state(model.stages(1)[0], settings.generator(model.name))
    one_s = whole_s(flat)
    best_gb_s = model.state_bytes / one_s / 1e9
    for paths in PATHS:
        row = _paths(model, flat, paths, one_s)
        best_gb_s = row.measured[SAVED]
        yield row
        progress.advance(1)
    del flat
    yield _at_once(model, one_s)
    progress.advance(1)
    yield _disk(model, best_gb_s)
    progress.advance(1)


def _paths(model: Opt, flat: Flat, paths: int, one_s: float) -> Row:
    if paths == 1:
        taken_s, shard_s, copied = one_s, one_s, 1.0
    else:
        group = Group(flat, paths)
        taken_s, shard_s = group.slowest_s(), group.slowest_shard_s()
        copied = max(map(group.moved_bytes, range(paths))) / model.state_bytes
        group.check(lost=paths // 2)
    measured = {
        SAVED: model.state_bytes / taken_s / 1e9,
        SCALING: one_s / taken_s,
        SHARD: model.state_bytes / shard_s / 1e9,
        SHARD_SCALING: one_s / shard_s,
        COPIED: copied,
    }
    published = {COPIED: paper.copied_by_a_node(paths, model.state_bytes)}
    if paths == COMPARED_PATHS and model != opt.OPT_125M:  # the paper's is of OPT-350M
        published[SHARD_SCALING] = paper.WEAK_SCALING
    case: Case = {"model": model.name, "paths": paths, "MB": round(model.state_bytes / 1e6)}
    return Row(ALONE, case, measured, published, _ALONE_NOTE)


def _at_once(model: Opt, one_s: float) -> Row:
    taken_s = at_once_s(model, 2)
    measured = {SAVED: model.state_bytes / taken_s / 1e9, SCALING: one_s / taken_s}
    return Row(AT_ONCE, {"model": model.name, "paths": 2}, measured, note=_SHARED_NOTE)


def _disk(model: Opt, saved_gb_s: float) -> Row:
    nbytes = min(model.state_bytes, 10**9)
    with tempfile.TemporaryDirectory() as folder:
        raw_s, saved_s = raw_write_s(Path(folder), nbytes), torch_save_s(Path(folder), nbytes)
    raw, saved = nbytes / raw_s / 1e9, nbytes / saved_s / 1e9
    measured = {
        "raw writes, GB/s": raw,
        OVER_RAW: saved_gb_s / raw,
        "torch.save, GB/s": saved,
        OVER_SAVE: saved_gb_s / saved,
    }
    published = {OVER_RAW: paper.OVER_TORCHSNAPSHOT, OVER_SAVE: paper.OVER_CHECKFREQ}
    case: Case = {"model": model.name, "paths": PATHS[-1]}
    return Row(DISK, case, measured, published, _DISK_NOTE)


def _strong(settings: Settings, progress: Progress) -> Iterator[Row]:
    models = _models(settings)
    progress.begin(float(len(models) * len(STAGE_COUNTS)))
    for model in models:
        one_s = 0.0
        for count in (count for count in STAGE_COUNTS if count <= model.layers):
            times = [_stage_s(model, stage, settings) for stage in model.stages(count)]
            one_s = one_s or times[0]
            yield _stages(model, count, max(times), one_s)
        progress.advance(len(STAGE_COUNTS))


def _stage_s(model: Opt, shapes: list[opt.Shape], settings: Settings) -> float:
    return whole_s(training_state(shapes, settings.generator(model.name, len(shapes))))


def _stages(model: Opt, count: int, slowest_s: float, one_s: float) -> Row:
    sizes = [sum(torch.Size(shape).numel() for shape in stage) for stage in model.stages(count)]
    measured = {
        SPEED: model.state_bytes / slowest_s / 1e9,
        OVER_ONE: one_s / slowest_s,
        LARGEST: max(sizes) * count / sum(sizes),
        SECONDS: slowest_s,
    }
    published = {OVER_ONE: paper.linear(count), SECONDS: paper.STAGE_SECONDS}
    case: Case = {"model": model.name, "stages": count, "MB": round(model.state_bytes / 1e6)}
    return Row(STAGES, case, measured, published, _ALONE_NOTE)


def _weak_verdict(rows: list[Row]) -> str:
    """Check that every node reads two n-ths of the state, and no more than rounding besides."""
    for row in rows:
        if COPIED in row.differing():
            return f"a node reads more than its share: {dict(row.case)}, {dict(row.measured)}"
    return ""


def _weak_plot(rows: list[Row], figure: Figure) -> None:
    """Plot the saving speed over the number of data-parallel paths, with parity and without."""
    axes = figure.subplots()
    found = [row for row in rows if row.table == ALONE and row.measured]
    for colour, model in enumerate(dict.fromkeys(str(row.case["model"]) for row in found)):
        mine = [row for row in found if row.case["model"] == model]
        for name, style in ((SAVED, "o-"), (SHARD, "s--")):
            label = f"{model}, {name.removesuffix(', GB/s')}"
            line(axes, mine, "paths", name, f"C{colour}{style}", label=label)
    axes.set(xlabel="data-parallel paths (simulated parallelism)", ylabel="state saved, GB/s")
    axes.legend(fontsize="small")


def _strong_plot(rows: list[Row], figure: Figure) -> None:
    """Plot the saving speed over the number of pipeline stages."""
    axes = figure.subplots()
    for model in dict.fromkeys(str(row.case["model"]) for row in rows):
        mine = [row for row in rows if row.case["model"] == model]
        line(axes, mine, "stages", SPEED, "o-", label=model)
    axes.set(xlabel="pipeline stages (simulated parallelism)", ylabel="state saved, GB/s")
    axes.legend(fontsize="small")


WEAK = Study(
    name="reft.weak-scaling",
    paper="REFT, section 6.2, weak scaling",
    reproduces="how fast nodes that hold replicas of one state save it together, each its shard "
    "and a parity",
    run=_weak,
    plot=_weak_plot,
    verdict=_weak_verdict,
)
STRONG = Study(
    name="reft.strong-scaling",
    paper="REFT, section 6.2, figures 10 and 11",
    reproduces="how fast pipeline stages save a model together, each its own part, without parity",
    run=_strong,
    plot=_strong_plot,
)
