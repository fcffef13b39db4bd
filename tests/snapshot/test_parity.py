"""Whatever nodes are lost within the parities, what is decoded is bit-equal to what was there."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.digest import hexdigest
from holdfast.errors import ConfigError
from holdfast.snapshot.parity import erasure_code, isal
from holdfast.snapshot.parity.isal import Bytes
from holdfast.snapshot.parity.stripes import Fragment, Striping

POISON = 0xAB


needs_isal = pytest.mark.skipif(
    not isal.available(),
    reason="a second parity needs ISA-L: pip install 'torch-holdfast[parity]'",
)
PARITIES = [1, pytest.param(2, marks=needs_isal)]
GROUPS = [
    *[(nodes, 1) for nodes in range(2, 10)],
    *[pytest.param(nodes, 2, marks=needs_isal) for nodes in range(3, 10)],
]


class Nodes:
    """The memory of a sharding group, filled as the plans say."""

    def __init__(self, striping: Striping, states: list[Bytes]) -> None:
        self.striping, self.states = striping, states
        self.buffers = [
            np.full(striping.buffer_nbytes, POISON, np.uint8) for _ in range(striping.nodes)
        ]
        for node, buffer in enumerate(self.buffers):
            span = striping.shard(node)
            buffer[: span.nbytes] = self.state_of(node)[span.start : span.stop]
            self.encode(node, self.read_state if striping.replicated else lambda _, f: self.at(f))

    def state_of(self, node: int) -> Bytes:
        return self.states[0 if self.striping.replicated else node]

    def at(self, fragment: Fragment) -> Bytes:
        return self.buffers[fragment.node][fragment.offset : fragment.offset + fragment.nbytes]

    def read_state(self, reader: int, fragment: Fragment) -> Bytes:
        place = self.striping.place(fragment)
        return self.state_of(reader)[place.start : place.stop]

    def encode(self, node: int, read: Callable[[int, Fragment], Bytes]) -> None:
        if not self.striping.replicated:
            # What other nodes hold has to be there first.
            for other, state in enumerate(self.states):
                self.buffers[other][: len(state)] = state
        for number, coding in enumerate(self.striping.encodings(node)):
            sources = [read(node, source) for source in coding.sources]
            erasure_code.encode(number, self.at(coding.target), sources)

    def lose(self, lost: tuple[int, ...]) -> None:
        for node in lost:
            self.buffers[node][:] = POISON

    def rebuild(self, lost: tuple[int, ...]) -> None:
        for rebuild in self.striping.decoding(lost):
            targets = {f.role: self.at(f) for f in rebuild.targets}
            sources = {f.role: self.at(f) for f in rebuild.sources}
            erasure_code.decode(targets, sources, self.striping.data_blocks)
        for node in lost:
            self.encode(node, lambda _, f: self.at(f))

    def digests(self) -> list[str]:
        return [hexdigest(buffer) for buffer in self.buffers]


def random_bytes(nbytes: int, seed: int) -> Bytes:
    raw = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    raw[raw == POISON] = 0
    return raw


def check_every_loss(striping: Striping, states: list[Bytes]) -> None:
    group = Nodes(striping, states)
    healthy = group.digests()
    for count in range(1, striping.parities + 1):
        for lost in combinations(range(striping.nodes), count):
            group.lose(lost)
            for node in lost:
                held = striping.shard_nbytes[node]
                assert group.digests()[node] != healthy[node] or not held
            group.rebuild(lost)
            assert group.digests() == healthy, lost


@pytest.mark.parametrize(("nodes", "parities"), GROUPS)
def test_every_loss_of_replicas_is_rebuilt_bit_for_bit(nodes: int, parities: int) -> None:
    edge = nodes * (nodes - parities) * 64
    for nbytes in (0, 1, 7, 63, 64, 65, edge - 1, edge, edge + 1, 3 * edge // 2 + 5, 100_003):
        striping = Striping.of_replicas(nodes, nbytes, parities)
        check_every_loss(striping, [random_bytes(nbytes, nbytes)])


@pytest.mark.parametrize("parities", PARITIES)
@given(data=st.data())
def test_every_loss_of_any_sizes_is_rebuilt_bit_for_bit(parities: int, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(parities + 1, 6))
    if data.draw(st.booleans()):
        sizes = [data.draw(st.integers(0, 5000))]
        striping = Striping.of_replicas(nodes, sizes[0], parities)
    else:
        sizes = data.draw(st.lists(st.integers(0, 1500), min_size=nodes, max_size=nodes))
        striping = Striping.of_shards(sizes, parities)
    check_every_loss(striping, [random_bytes(size, size + i) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("parities", PARITIES)
def test_large_odd_blocks_cross_every_chunk(parities: int) -> None:
    nbytes = 7_340_033
    striping = Striping.of_replicas(4, nbytes, parities)
    assert striping.block_nbytes > 2 * erasure_code._XOR_CHUNK_BYTES
    check_every_loss(striping, [random_bytes(nbytes, 0)])


def stripe(k: int, parities: int, nbytes: int, seed: int = 0) -> list[Bytes]:
    data = [random_bytes(nbytes, seed + j) for j in range(k)]
    coded = [np.full(nbytes, POISON, np.uint8) for _ in range(parities)]
    for number, target in enumerate(coded):
        erasure_code.encode(number, target, data)
    return [*data, *coded]


def test_the_first_parity_is_the_xor_byte_by_byte() -> None:
    data = stripe(3, 1, 1001)
    expected = [int(a) ^ int(b) ^ int(c) for a, b, c in zip(*data[:3], strict=True)]
    assert data[3].tolist() == expected


def times_two(value: int) -> int:
    """In GF(256) with the polynomial x⁸+x⁴+x³+x²+1."""
    return (value << 1 ^ (0x11D if value & 0x80 else 0)) & 0xFF


@needs_isal
def test_the_second_parity_is_raid_6s_byte_by_byte() -> None:
    data = stripe(4, 2, 301)
    expected = []
    for column in zip(*(block.tolist() for block in data[:4]), strict=True):
        total = 0
        for value in reversed(column):
            total = times_two(total) ^ value
        expected.append(total)
    assert data[5].tolist() == expected


@needs_isal
@pytest.mark.parametrize("k", [2, 40, 255])
def test_two_parities_find_any_two_lost_of_up_to_255(k: int) -> None:
    fragments = stripe(k, 2, 65)
    pairs = list(combinations(range(k + 2), 2))
    for lost in pairs[:: max(1, len(pairs) // 300)]:
        wanted = [role for role in lost if role < k]
        alive = [role for role in range(k + 2) if role not in lost][:k]
        found = {role: np.full(65, POISON, np.uint8) for role in wanted}
        erasure_code.decode(found, {role: fragments[role] for role in alive}, k)
        assert all((found[role] == fragments[role]).all() for role in wanted), lost


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=needs_isal)])
@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_sources_may_come_one_at_a_time_and_columns_in_any_order(
    number: int, lengths: list[int], seed: int
) -> None:
    blocks = [random_bytes(nbytes, seed + j) for j, nbytes in enumerate(lengths)]
    longest = max(lengths)
    whole = np.full(longest, POISON, np.uint8)
    erasure_code.encode(number, whole, blocks)
    summed = np.zeros(longest, np.uint8)
    row = erasure_code.encoding_row(number, len(blocks))
    for block, coefficient in reversed(list(zip(blocks, row, strict=True))):
        erasure_code.accumulate(summed, block, coefficient)
    assert summed.tolist() == whole.tolist()
    columns = np.full(longest, POISON, np.uint8)
    for start in reversed(range(0, longest, 64)):
        parts = [block[start : start + 64] for block in blocks]
        erasure_code.combine([columns[start : start + 64]], parts, (row,))
    assert columns.tolist() == whole.tolist()


def test_a_damaged_source_decodes_to_something_that_its_digest_refuses() -> None:
    fragments = stripe(3, 1, 1000)
    digest = hexdigest(fragments[0])
    found = np.zeros(1000, np.uint8)
    sources = {role: fragments[role].copy() for role in (1, 2, 3)}
    erasure_code.decode({0: found}, sources, 3)
    assert hexdigest(found) == digest
    sources[2][500] ^= 1
    erasure_code.decode({0: found}, sources, 3)
    assert hexdigest(found) != digest


@pytest.fixture
def no_isal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    isal.library.cache_clear()
    isal.available.cache_clear()
    monkeypatch.setattr(isal, "_bundled", lambda: ["/nowhere/libisal.so"])
    monkeypatch.setattr(isal, "_SYSTEM_NAME", "libisal-that-is-not-there.so")
    yield
    isal.library.cache_clear()
    isal.available.cache_clear()


@pytest.mark.usefixtures("no_isal")
@pytest.mark.parametrize("nodes", range(2, 10))
def test_one_parity_needs_no_isal(nodes: int) -> None:
    assert not isal.available()
    for nbytes in (0, 1, 65, nodes * (nodes - 1) * 64 + 1, 2_000_003):
        check_every_loss(Striping.of_replicas(nodes, nbytes), [random_bytes(nbytes, nodes)])


def test_one_parity_of_more_blocks_than_gf256_has_elements() -> None:
    fragments = stripe(300, 1, 65)
    found = np.full(65, POISON, np.uint8)
    alive = {role: block for role, block in enumerate(fragments) if role != 7}
    erasure_code.decode({7: found}, alive, 300)
    assert found.tolist() == fragments[7].tolist()


@pytest.mark.usefixtures("no_isal")
def test_a_second_parity_without_isal_says_what_to_install() -> None:
    blocks = [np.zeros(8, np.uint8)] * 3
    with pytest.raises(ConfigError, match=r"pip install 'torch-holdfast\[parity\]'"):
        erasure_code.encode(1, np.zeros(8, np.uint8), blocks)


@pytest.mark.parametrize(
    ("target", "blocks", "message"),
    [
        (np.zeros(7, np.uint8), [np.zeros(8, np.uint8)], "parity of 7 bytes for blocks of .8."),
        (np.zeros(8, np.uint8), [], "parity of 8 bytes for blocks of"),
        (np.zeros(8, np.int8), [np.zeros(8, np.uint8)], "a buffer of int8"),
        (np.zeros(8, np.uint8), [np.zeros((8, 1), np.uint8)], r"shape \(8, 1\)"),
        (np.zeros(8, np.uint8), [np.zeros(16, np.uint8)[::2]], r"strides \(2,\)"),
        (np.frombuffer(bytes(8), np.uint8), [np.zeros(8, np.uint8)], "read-only"),
    ],
)
def test_buffers_that_cannot_be_meant_are_refused(
    target: Bytes, blocks: list[Bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        erasure_code.encode(0, target, blocks)


def test_a_target_among_its_sources_is_refused() -> None:
    buffer = np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="shares memory"):
        erasure_code.encode(0, buffer[:64], [buffer[32:96], buffer[64:]])
    with pytest.raises(ValueError, match="128 bytes cannot be added to 64"):
        erasure_code.accumulate(np.zeros(64, np.uint8), buffer, 1)


@pytest.mark.parametrize(
    ("lost", "available"),
    [((0,), (1,)), ((0,), (0, 1)), ((0,), (1, 1)), ((3,), (0, 1)), ((0,), (1, 4)), ((2,), (0, 1))],
)
def test_roles_that_cannot_be_meant_are_refused(
    lost: tuple[int, ...], available: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="2 different others are needed"):
        erasure_code.decoding_rows(lost, available, 2)


def test_there_is_no_third_parity() -> None:
    with pytest.raises(ValueError, match="parity 2 of 3 data blocks"):
        erasure_code.encoding_row(2, 3)
    with pytest.raises(ValueError, match="at most 255 blocks"):
        erasure_code.encoding_row(1, 256)


def test_the_coding_imports_no_torch() -> None:
    modules = "holdfast.snapshot.parity.erasure_code, holdfast.snapshot.layout.groups"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "False"
