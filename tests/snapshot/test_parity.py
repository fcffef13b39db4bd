"""Whatever nodes are lost within the parities, what is decoded is bit-equal to what was there."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.snapshot.parity import erasure_code, isal
from holdfast.snapshot.parity.isal import Bytes

POISON = 0xAB


needs_isal = pytest.mark.skipif(
    not isal.available(),
    reason="a second parity needs ISA-L: pip install 'torch-holdfast[parity]'",
)
ROOM = np.zeros(8, np.uint8)
PARITIES = [1, pytest.param(2, marks=needs_isal)]


def random_bytes(nbytes: int, seed: int) -> Bytes:
    raw = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    raw[raw == POISON] = 0
    return raw


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


def check_losses(k: int, parities: int, nbytes: int) -> None:
    """Lose as many fragments of a stripe as it has parities, and check that its data comes back."""
    fragments = stripe(k, parities, nbytes)
    losses = list(combinations(range(k + parities), parities))
    for lost in losses[:: max(1, len(losses) // 300)]:
        wanted = [role for role in lost if role < k]
        alive = [role for role in range(k + parities) if role not in lost][:k]
        found = {role: np.full(nbytes, POISON, np.uint8) for role in wanted}
        erasure_code.decode(found, {role: fragments[role] for role in alive}, k)
        assert all((found[role] == fragments[role]).all() for role in wanted), lost


@pytest.mark.parametrize("parities", PARITIES)
@pytest.mark.parametrize("nbytes", [0, 1, 63, 65, 3 * erasure_code._XOR_CHUNK_BYTES + 1])
def test_what_is_lost_within_the_parities_is_found(nbytes: int, parities: int) -> None:
    for k in range(1, 8 if nbytes < 100 else 3):
        check_losses(k, parities, nbytes)


@pytest.mark.parametrize(
    ("k", "parities"),
    [(300, 1), *(pytest.param(k, 2, marks=needs_isal) for k in (40, 255))],
)
def test_wide_stripes(k: int, parities: int) -> None:
    """Two parities go up to 255 blocks, as GF(256) has no more elements; one has no limit."""
    check_losses(k, parities, 65)


@pytest.mark.usefixtures("no_isal")
@pytest.mark.parametrize("nbytes", [0, 65, 2_000_003])
def test_one_parity_needs_no_isal(nbytes: int) -> None:
    assert not isal.available()
    for k in range(1, 5):
        check_losses(k, 1, nbytes)


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
def test_a_second_parity_without_isal_says_what_to_install() -> None:
    blocks = [np.zeros(8, np.uint8)] * 3
    with pytest.raises(ConfigError, match=r"pip install 'torch-holdfast\[parity\]'"):
        erasure_code.encode(1, np.zeros(8, np.uint8), blocks)


@pytest.mark.parametrize(
    ("target", "blocks", "message"),
    [
        (ROOM[:7], [ROOM], "parity of 7 bytes for blocks of .8."),
        (ROOM, [], "parity of 8 bytes for blocks of"),
        (np.zeros(8, np.int8), [ROOM], "a buffer of int8"),
        (ROOM, [np.zeros((8, 1), np.uint8)], r"shape \(8, 1\)"),
        (ROOM, [np.zeros(16, np.uint8)[::2]], r"strides \(2,\)"),
        (np.frombuffer(bytes(8), np.uint8), [np.zeros(8, np.uint8)], "read-only"),
        (ROOM, [np.zeros(8, np.uint8), ROOM[4:]], "shares memory"),
    ],
)
def test_buffers_that_cannot_be_meant_are_refused(
    target: Bytes, blocks: list[Bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        erasure_code.encode(0, target, blocks)


def test_numbers_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="128 bytes cannot be added to 64"):
        erasure_code.accumulate(np.zeros(64, np.uint8), np.zeros(128, np.uint8), 1)
    with pytest.raises(ValueError, match="parity 2 of 3 data blocks"):
        erasure_code.encoding_row(2, 3)
    with pytest.raises(ValueError, match="at most 255 blocks"):
        erasure_code.encoding_row(1, 256)
    for lost, available in [
        (0, (1,)),
        (0, (0, 1)),
        (0, (1, 1)),
        (3, (0, 1)),
        (0, (1, 4)),
        (2, (0, 1)),
    ]:
        with pytest.raises(ValueError, match="2 different others are needed"):
            erasure_code.decoding_rows((lost,), available, 2)
