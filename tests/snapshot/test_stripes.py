"""Every byte lies on exactly one node, within the memory bound, and survives what it must."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError, SnapshotLost
from holdfast.snapshot.parity.stripes import ALIGNMENT_BYTES, Fragment, Striping, portion

SIZES = st.one_of(st.integers(0, 3000), st.integers(0, 2**45))


@st.composite
def stripings(draw: st.DrawFn) -> Striping:
    parities = draw(st.integers(1, 2))
    nodes = draw(st.integers(parities + 1, 9))
    if draw(st.booleans()):
        return Striping.of_replicas(nodes, draw(SIZES), parities)
    sizes = st.lists(SIZES, min_size=nodes, max_size=nodes)
    return Striping.of_shards(draw(sizes), parities)


def fragments(striping: Striping) -> list[list[Fragment]]:
    nodes = range(striping.nodes)
    return [[striping.fragment(stripe, node) for node in nodes] for stripe in nodes]


@given(stripings())
def test_each_stripe_has_one_fragment_a_node_and_each_role_once(striping: Striping) -> None:
    for stripe, row in enumerate(fragments(striping)):
        assert sorted(f.role for f in row) == list(range(striping.nodes))
        assert [(f.stripe, f.node) for f in row] == [(stripe, n) for n in range(striping.nodes)]
        data = [f.nbytes for f in row if f.role < striping.data_blocks]
        parity = [f.nbytes for f in row if f.role >= striping.data_blocks]
        assert parity == [max(data)] * striping.parities


@given(stripings())
def test_the_fragments_of_a_node_fill_its_buffer_without_overlap(striping: Striping) -> None:
    for column in zip(*fragments(striping), strict=True):
        placed = sorted(column, key=lambda f: (f.offset, f.role >= striping.data_blocks))
        assert [f.offset for f in placed] == [
            slot * striping.block_nbytes for slot in range(striping.nodes)
        ]
        assert all(f.nbytes <= striping.block_nbytes for f in placed)
        # Data comes first, and is the whole shard in one piece.
        data = placed[: striping.data_blocks]
        assert all(f.role < striping.data_blocks for f in data)
        assert sum(f.nbytes for f in data) == striping.shard_nbytes[column[0].node]
        ends = [f.offset + f.nbytes for f in data if f.nbytes]
        assert [f.offset for f in data if f.nbytes][1:] == ends[:-1]


@given(st.integers(1, 2), st.integers(0, 6), SIZES)
def test_replicas_divide_the_state_without_gap_or_overlap(
    parities: int, more: int, nbytes: int
) -> None:
    striping = Striping.of_replicas(parities + 1 + more, nbytes, parities)
    end = 0
    for node in range(striping.nodes):
        span = striping.shard(node)
        assert span.start == end
        assert span.nbytes == striping.shard_nbytes[node]
        end = span.stop
    assert end == nbytes
    places = [
        striping.place(f)
        for row in fragments(striping)
        for f in row
        if f.role < striping.data_blocks and f.nbytes
    ]
    places.sort(key=lambda span: span.start)
    assert sum(span.nbytes for span in places) == nbytes
    assert all(span.start % ALIGNMENT_BYTES == 0 for span in places)
    assert all(span.stop % ALIGNMENT_BYTES == 0 for span in places[:-1])
    assert [span.stop for span in places[:-1]] == [span.start for span in places[1:]]


@given(st.integers(1, 2), st.integers(0, 6), SIZES)
def test_memory_and_copying_stay_within_their_bounds(parities: int, more: int, size: int) -> None:
    n = parities + 1 + more
    replicas = Striping.of_replicas(n, size, parities)
    rounding = ALIGNMENT_BYTES * n
    assert replicas.buffer_nbytes * (n - parities) < size + rounding * (n - parities)
    if parities == 1:
        assert replicas.buffer_nbytes * n * (n - 1) <= size * n + rounding * n * (n - 1)
    for node in range(n):
        copied = replicas.shard_nbytes[node] + sum(
            source.nbytes for coding in replicas.encodings(node) for source in coding.sources
        )
        assert copied * n <= (1 + parities) * (size + rounding * n)
        used = max(replicas.fragment(stripe, node).offset for stripe in range(n))
        assert used + replicas.block_nbytes == replicas.buffer_nbytes
    shards = Striping.of_shards([size, *[0] * (n - 1)], parities)
    assert shards.buffer_nbytes * (n - parities) <= n * size + rounding * (n - parities)


def test_what_is_survivable_and_what_is_not() -> None:
    with pytest.raises(ConfigError, match="at least 3"):
        Striping.of_replicas(2, 1000, 2)
    for parities, nodes in product((1, 2), range(3, 8)):
        striping = Striping.of_replicas(nodes, 1000, parities)
        for lost in (set(lost) for n in range(nodes + 1) for lost in combinations(range(nodes), n)):
            if len(lost) > parities:
                with pytest.raises(SnapshotLost, match="reload a persisted checkpoint"):
                    striping.check_loss(lost)
            else:
                striping.check_loss(lost)


def test_the_picture_in_the_docstring_is_the_layout() -> None:
    roles = [[f.role for f in row] for row in fragments(Striping.of_replicas(4, 4 * 3 * 64))]
    assert roles == [[3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0], [0, 1, 2, 3]]
    roles = [[f.role for f in row] for row in fragments(Striping.of_replicas(5, 5 * 3 * 64, 2))]
    assert (roles[0], roles[4]) == ([3, 4, 0, 1, 2], [4, 0, 1, 2, 3])


@given(SIZES, st.integers(1, 9))
def test_local_ranks_share_the_work_without_gap(nbytes: int, parts: int) -> None:
    spans = [portion(nbytes, part, parts) for part in range(parts)]
    assert spans[0].start == 0
    assert spans[-1].stop == nbytes
    assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert all(span.start % ALIGNMENT_BYTES == 0 or not span.nbytes for span in spans)
    assert max(span.nbytes for span in spans) * parts < nbytes + ALIGNMENT_BYTES * parts


@pytest.mark.parametrize(
    ("nodes", "nbytes", "parities", "message"),
    [
        (1, 10, 1, "at least 2 are needed"),
        (0, 10, 1, "at least 2"),
        (4, 10, -1, "parities=-1: must be 0, 1 or 2"),
        (4, 10, 3, "parities=3: must be 0, 1 or 2"),
        (258, 10, 2, "at most 257 nodes"),
        (4, -1, 1, "a state of -1 bytes"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    nodes: int, nbytes: int, parities: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Striping.of_replicas(nodes, nbytes, parities)
    with pytest.raises(ConfigError, match=message):
        Striping.of_shards([nbytes] * nodes, parities)


def test_a_node_outside_the_group_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"nodes \[4\] are not among the group's 0 … 3"):
        Striping.of_replicas(4, 100).check_loss([1, 4])
    with pytest.raises(ValueError, match="part=2 of parts=2"):
        portion(100, 2, 2)
