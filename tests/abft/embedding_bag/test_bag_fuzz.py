"""Whatever a bag is asked for: the reference's values, or an error that names what is wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bag_cases import changed, table_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from struck import kinds
from torch._subclasses.fake_tensor import FakeTensorMode

from holdfast import ConfigError, events, native
from holdfast.abft import policy
from holdfast.abft.embedding_bag import KINDS, Batch, Table, embedding_bag, embedding_bags
from holdfast.abft.embedding_bag.reference import differing

REFUSALS = (ValueError, TypeError, IndexError, ConfigError)
ROWS = 12
FAR = [ROWS, -1, (1 << 31) - 1, -(1 << 31)]
FARTHER = [(1 << 63) - 1, -(1 << 63), 1 << 32]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda x: x,
    "strided": lambda x: x.repeat_interleave(2, 0)[::2],
    "reversed twice": lambda x: x.flip(0).flip(0),
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() == 2 else x,
    "shifted": lambda x: torch.cat([x[:1], x])[1:],
    "lazily negated": lambda x: torch._neg_view(-x),
}
ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda x: x.double(),
    "int16": lambda x: x.short(),
    "uint64": lambda x: x.to(torch.uint64),
    "bool": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8),
    "scalar": lambda x: x.sum(),
    "cube": lambda x: x[None, None],
    "matrix": lambda x: x.reshape(1, -1),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "list": lambda x: x.tolist(),
    "huge": lambda x: x.new_zeros(1).expand(1 << 42),
    "huge and empty": lambda x: x.new_zeros(1 << 42, 0),
    "huge matrix": lambda x: x.new_zeros(1, 1).expand(1 << 21, 1 << 21),
}


def mostly(good: list[Any], odd: list[Any]) -> st.SearchStrategy[Any]:
    """One of the good, one time in ten one of the others."""
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(good if n else odd))


@st.composite
def tensors(draw: st.DrawFn, values: torch.Tensor, *, whole: bool = True) -> Any:
    """The values, of some dtype and layout; one time in ten something odd is made of them."""
    if whole and draw(st.booleans()) and not (values.abs() >> 31).any():
        values = values.int()
    if draw(st.integers(0, 9)) == 9:
        return ODD[draw(st.sampled_from(list(ODD)))](values)
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](values)


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(0, 30), max_size=6))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    indices = torch.randint(0, ROWS, (sum(sizes),), generator=seed)
    if len(indices) and draw(st.integers(0, 9)) == 9:
        indices[draw(st.integers(0, len(indices) - 1))] = draw(st.sampled_from(FAR + FARTHER))
    offsets: torch.Tensor | None = torch.tensor([0, *sizes]).cumsum(0)
    include_last = draw(st.booleans())
    if not include_last or draw(st.integers(0, 9)) == 9:
        offsets = offsets[:-1]  # type: ignore[index]
    assert offsets is not None
    if len(offsets) and draw(st.integers(0, 9)) == 9:
        offsets[draw(st.integers(0, len(offsets) - 1))] = draw(st.sampled_from(FAR + FARTHER))
    if draw(st.integers(0, 9)) == 9:
        indices, offsets = indices[: len(indices) // 2 * 2].view(-1, 2), None
    made: dict[str, Any] = {
        "include_last_offset": include_last,
        "padding_idx": draw(mostly([None, None, 0, 7, -1, -ROWS], [ROWS, -ROWS - 1, 1 << 70, 0.5])),
        "mode": draw(mostly(["sum", "sum", "mean"], ["max", None])),
        "dtype": draw(mostly([torch.float32, torch.float16], [torch.bfloat16, None])),
        "prefetch": draw(st.booleans()),
    }
    if draw(st.booleans()):
        weights = torch.randn(indices.shape, generator=seed)
        if weights.numel():
            strange = [torch.nan, torch.inf, -torch.inf, 3e38, 1e-42, 0.0, -0.0]
            weights.view(-1)[0] = draw(mostly([1.0], strange))
        made["per_sample_weights"] = draw(tensors(weights, whole=False))
    made["indices"] = draw(tensors(indices))
    made["offsets"] = None if offsets is None else draw(tensors(offsets))
    return made


@contextmanager
def using(core: Any) -> Iterator[None]:
    """Pool by this native core, or by plain torch."""
    kept, native.core = native.core, core
    try:
        yield
    finally:
        native.core = kept


def outcome(table: Table, arguments: dict[str, Any], core: Any) -> Any:
    try:
        with using(core):
            return embedding_bag(table, **arguments)
    except REFUSALS as refused:
        return refused


@pytest.mark.skipif(native.core is None, reason="there is no native core")
@given(
    arguments=asked(),
    kind=st.sampled_from(list(KINDS)),
    dim=st.sampled_from([1, 2, 15, 16, 17, 64, 70]) | st.integers(1, 70),
    seed=st.integers(0, 9),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_the_references_values_or_an_error_that_says_why(
    arguments: dict[str, Any], kind: str, dim: int, seed: int
) -> None:
    table = table_of(kind, dim + dim % 2 if kind == "uint4" else dim, ROWS, seed)
    alarms = policy.process.false_alarms
    ours, reference = (outcome(table, arguments, core) for core in (native.core, None))
    assert type(ours) is type(reference), (ours, reference)
    if isinstance(ours, Exception):
        assert len(str(ours)) > 15
        assert type(outcome(table, arguments | {"prefetch": False}, native.core)) is type(ours)
    else:
        assert_close(ours, reference, table, arguments)
    assert events.recent() == []
    # Weights may be NaN, INF or so large that sums overflow: such bags are suspected and cleared.
    assert policy.process.false_alarms == alarms or "per_sample_weights" in arguments


def assert_close(
    ours: torch.Tensor, reference: torch.Tensor, table: Table, arguments: dict[str, Any]
) -> None:
    """Equal but for fp32's accumulation; what is NaN or INF in one is so in the other."""
    assert ours.shape == reference.shape
    assert ours.dtype == reference.dtype
    weights = arguments.get("per_sample_weights")
    largest = (
        1.0
        if weights is None or not len(weights)
        else float(weights.abs().nan_to_num(0).amax()) or 1.0
    )
    count = arguments["indices"].numel() if ours.numel() else 1
    unit = 2.0**-10 if ours.dtype is torch.float16 else 2.0**-22 * count
    size = float(table.values(torch.arange(ROWS)).abs().max()) * max(1.0, largest) * count
    finite = ours.isfinite() & reference.isfinite()
    assert ((ours - reference).abs()[finite] <= unit * size).all()
    near = float(torch.finfo(ours.dtype).max) / 4
    beyond = ~finite & ~(ours.isnan() & reference.isnan()) & (ours != reference)
    # An overflow on the way, or where only one of them rounds beyond the largest number.
    assert not beyond.any() or size > near


@pytest.mark.skipif(native.core is None, reason="there is no native core")
@given(calls=st.lists(st.tuples(asked(), st.sampled_from(list(KINDS))), max_size=4))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_many_tables_at_once_give_what_each_gives(calls: list[tuple[dict[str, Any], str]]) -> None:
    apart, together = [], []
    for arguments, kind in calls:
        table, given = table_of(kind, 16, ROWS), dict(arguments)
        single = outcome(table, given, native.core)
        if isinstance(single, Exception):
            continue
        padding = given.pop("padding_idx")
        batch = Batch(
            given["indices"],
            given["offsets"],
            given.get("per_sample_weights"),
            given["include_last_offset"],
            given["mode"],
            -1 if padding is None else padding % ROWS,
            given["dtype"],
            given["prefetch"],
        )
        apart.append(single)
        together.append((table, batch))
    outputs = embedding_bags(together)
    assert len(outputs) == len(apart)
    for ours, single in zip(outputs, apart, strict=True):
        assert ours.dtype == single.dtype
        assert not differing(ours, single).any()
    assert events.recent() == []


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    layout=st.sampled_from(list(LAYOUTS)),
    kind=st.sampled_from(list(KINDS)),
    weighted=st.booleans(),
    where=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    core=st.booleans(),
)
def test_a_struck_bag_is_pooled_again_and_without_the_check_gets_out(
    sizes: list[int],
    layout: str,
    kind: str,
    weighted: bool,
    where: tuple[int, int],
    core: bool,
) -> None:
    table = table_of(kind, 16, ROWS)
    indices = torch.arange(sum(sizes)) % ROWS
    arguments: dict[str, Any] = {
        "indices": LAYOUTS[layout](indices),
        "offsets": LAYOUTS[layout](torch.tensor([0, *sizes]).cumsum(0)[:-1]),
    }
    if weighted:
        arguments["per_sample_weights"] = LAYOUTS[layout](torch.ones(len(indices)))
    bag, column = where[0] % len(sizes), where[1] % 16
    events.clear()
    with using(native.core if core else None):
        clean = embedding_bag(table, **arguments)
        assert events.recent() == []
        with changed(bag, column, 16.0):
            unchecked = embedding_bag(table, **arguments, verify=False)
            assert events.recent() == []
            repaired = embedding_bag(table, **arguments)
    assert (unchecked != clean).nonzero().tolist() == [[bag, column]]
    assert torch.equal(repaired, clean)
    assert kinds() == ["embedding_bag_fault"]
