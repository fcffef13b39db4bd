"""States go through a buffer and a manifest bit for bit, and nothing else comes out of one."""

import ctypes
import os
import pickle
import time
from collections import Counter, OrderedDict
from enum import Enum
from threading import current_thread, main_thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from snapshot_shares import DTYPES, never, random_tensor

from holdfast.digest.tensors import state_digest
from holdfast.errors import ConfigError, SnapshotCorrupt
from holdfast.snapshot.layout import flat_buffer, manifest


class Colour(Enum):
    RED = "red"


def stored(state: object) -> tuple[manifest.Manifest, torch.Tensor]:
    flat = flat_buffer.flatten(state)
    entries = flat_buffer.plan(flat)
    buffer = torch.full((flat_buffer.total_bytes(entries) + 1,), 0xAB, dtype=torch.uint8)
    written = flat_buffer.write(flat, entries, buffer, never)
    blob = manifest.encode(flat.skeleton, written)
    return manifest.decode(blob, manifest.digest_of(blob)), buffer


def loaded(described: manifest.Manifest, buffer: torch.Tensor) -> Any:
    return flat_buffer.unflatten(described.skeleton, flat_buffer.read(described.entries, buffer))


tensors = st.builds(
    random_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**31),
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.frozensets(st.integers(), max_size=1),
    st.sampled_from([Colour.RED, torch.Size([2, 3]), torch.float16, torch.device("cpu")]),
    st.sampled_from([np.arange(3.0), np.float32(0.1), np.zeros((2, 0), np.int8)]),
)
keys = st.one_of(st.text(max_size=4), st.integers())
states = st.recursive(
    tensors | plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(states)
def test_any_state_survives_bit_for_bit(state: object) -> None:
    assert state_digest(loaded(*stored(state))) == state_digest(state)


@given(states, st.data())
def test_any_flipped_bit_of_a_tensor_is_found_and_named(state: object, data: Any) -> None:
    described, buffer = stored(state)
    entries = [entry for entry in described.entries if entry.nbytes]
    if not entries:
        return
    entry = data.draw(st.sampled_from(entries))
    at = entry.offset + data.draw(st.integers(0, entry.nbytes - 1))
    buffer[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotCorrupt) as caught:
        loaded(described, buffer)
    assert str(caught.value).startswith(entry.path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::2],
        torch.arange(12.0)[::2][:1],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(1).expand(5),
        torch.tensor(3.0),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ],
    ids=["transposed", "strided", "single", "conjugated", "expanded", "scalar", "empty", "nan"],
)
def test_unusual_tensors(tensor: torch.Tensor) -> None:
    back = loaded(*stored({"x": tensor}))["x"]
    assert state_digest(back) == state_digest(tensor.clone().contiguous().resolve_conj())
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)


def test_tied_tensors_are_stored_once_at_aligned_places_and_stay_tied() -> None:
    weight = torch.randn(5, 4)
    described, buffer = stored({"a": weight, "b": [weight.view(5, 4)], "other": weight[:2]})
    assert [(entry.path, entry.offset) for entry in described.entries] == [("a", 0), ("other", 128)]
    back = loaded(described, buffer)
    assert back["a"] is back["b"][0]
    assert state_digest(back["other"]) == state_digest(weight[:2])


def test_a_manifest_may_say_more_and_says_nothing_else_by_default() -> None:
    flat = flat_buffer.flatten({"x": torch.ones(3), "n": 3})
    entries = flat_buffer.plan(flat)
    rows = list(map(tuple, entries))
    plain = manifest.encode(flat.skeleton, entries)
    assert plain == pickle.dumps((flat.skeleton, rows), protocol=4)
    assert manifest.decode(plain, manifest.digest_of(plain)).attachment is None
    more = manifest.encode(flat.skeleton, entries, (b"more", {1: "x"}))
    assert manifest.decode(more, manifest.digest_of(more)).attachment == (b"more", {1: "x"})


def test_what_is_read_shares_no_memory_with_the_buffer() -> None:
    described, buffer = stored({"x": torch.zeros(8)})
    back = loaded(described, buffer)["x"]
    buffer.fill_(255)
    assert back.eq(0).all()


def test_a_copy_that_went_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = flat_buffer.copy_each

    def copy_and_flip(rows: Any) -> bytes:
        found = original(rows)
        ctypes.c_char.from_address(int(rows[0, 1]) + 7).value = b"!"
        return found

    monkeypatch.setattr(flat_buffer, "copy_each", copy_and_flip)
    described, buffer = stored({"x": torch.arange(64.0)})
    monkeypatch.undo()
    with pytest.raises(SnapshotCorrupt, match="x "):
        flat_buffer.read(described.entries, buffer)


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: 0, "function"),
        (Odd(), "Odd"),
        (os.system, "builtin_function_or_method"),
        (np.array([Odd()]), "ndarray"),
        (Odd, "type"),
        (bytearray(b"x"), "bytearray"),
    ],
)
def test_refused_types_are_named_with_path_and_remedy(value: object, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flat_buffer.flatten({"scheduler": {"lr_lambdas": [value]}})
    assert f"'scheduler.lr_lambdas.0' is a <{name}>" in str(caught.value)
    assert "keep it out of the state_dict" in str(caught.value)


def test_refused_sparse_and_endless() -> None:
    with pytest.raises(ConfigError, match="sparse"):
        flat_buffer.flatten({"x": torch.eye(2).to_sparse()})
    endless: dict[str, object] = {}
    endless["again"] = endless
    with pytest.raises(ConfigError, match="nested without end"):
        flat_buffer.flatten(endless)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 7",)


@pytest.mark.parametrize("payload", [Evil(), eval, Odd()])
def test_the_unpickler_refuses_what_no_manifest_holds(payload: object) -> None:
    blob = pickle.dumps((payload, []))
    with pytest.raises(SnapshotCorrupt, match="no type of a manifest"):
        manifest.decode(blob, manifest.digest_of(blob))


def test_a_damaged_manifest_is_never_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = flat_buffer.flatten({"x": torch.ones(2), "n": 3})
    blob = manifest.encode(flat.skeleton, flat_buffer.plan(flat))
    digest = manifest.digest_of(blob)
    monkeypatch.setattr(manifest, "_Unpickler", None)
    for at in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[at] ^= 4
        with pytest.raises(SnapshotCorrupt, match="does not match digest"):
            manifest.decode(bytes(damaged), digest)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> flat_buffer.Flat:
    """Tensors each of which is a batch of its own."""
    monkeypatch.setattr(flat_buffer, "_BATCH_BYTES", 64)
    return flat_buffer.flatten([torch.arange(16.0) + k for k in range(40)])


def test_a_cancelled_copy_stops_between_batches(many: flat_buffer.Flat) -> None:
    entries = flat_buffer.plan(many)
    buffer = torch.zeros(flat_buffer.total_bytes(entries), dtype=torch.uint8)
    answers = iter([False, True])
    with pytest.raises(flat_buffer.Cancelled, match=r"abandoned at 1$"):
        flat_buffer.write(many, entries, buffer, lambda: next(answers))
    assert buffer[: entries[1].offset].any()
    assert not buffer[entries[1].offset :].any()
    with pytest.raises(ValueError, match="0 does not fit into a buffer of 8 bytes"):
        flat_buffer.write(many, entries, buffer[:8], never)


def test_helpers_copy_the_rest_and_change_nothing(
    many: flat_buffer.Flat, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, copy_tensors = flat_buffer.plan(many), flat_buffer.copy_tensors
    by_thread: Counter[str] = Counter()

    def seen(*given: Any) -> Any:
        by_thread[current_thread().name] += 1
        time.sleep(0.002)
        return copy_tensors(*given)

    def copied(helpers: int) -> tuple[list[manifest.Entry], torch.Tensor]:
        buffer = torch.zeros(flat_buffer.total_bytes(entries), dtype=torch.uint8)
        return flat_buffer.write(many, entries, buffer, never, lambda: helpers), buffer

    alone, expected = copied(0)
    monkeypatch.setattr(flat_buffer, "copy_tensors", seen)
    together, found = copied(2)
    assert together == alone
    assert torch.equal(found, expected)
    assert (len(by_thread), by_thread.total()) == (3, 40)


def test_a_helper_that_fails_fails_the_copy(
    many: flat_buffer.Flat, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, copy_tensors = flat_buffer.plan(many), flat_buffer.copy_tensors

    def fails(*given: Any) -> Any:
        if current_thread() is not main_thread():
            raise IndexError("as a bug would")
        time.sleep(0.002)
        return copy_tensors(*given)

    monkeypatch.setattr(flat_buffer, "copy_tensors", fails)
    buffer = torch.zeros(flat_buffer.total_bytes(entries), dtype=torch.uint8)
    with pytest.raises(IndexError, match="as a bug would"):
        flat_buffer.write(many, entries, buffer, never, lambda: 1)


def test_mutable_plain_values_are_captured_at_once() -> None:
    state = {"seen": {1, 2}, "list": [1], "array": np.zeros(2)}
    flat = flat_buffer.flatten(state)
    before = state_digest(flat_buffer.unflatten(flat.skeleton, []))
    state["seen"].add(3)  # type: ignore[attr-defined]
    state["list"].append(2)  # type: ignore[attr-defined]
    state["array"][0] = 1  # type: ignore[index]
    assert state_digest(flat_buffer.unflatten(flat.skeleton, [])) == before


def test_sets_and_counters_come_back_equal_and_of_their_type() -> None:
    state = {"set": {1, 2, 140}, "frozen": frozenset("abc"), "milestones": Counter({30: 2, 60: 1})}
    back = loaded(*stored(state))
    assert back == state
    assert [type(back[name]) for name in state] == [set, frozenset, Counter]


def test_a_manifest_of_an_older_release_is_read_though_its_classes_have_moved() -> None:
    flat = flat_buffer.flatten({"w": torch.ones(3)})
    blob = manifest.encode(flat.skeleton, flat_buffer.plan(flat))
    former = b"holdfast.snapshot.manifest"
    name = manifest.__name__.encode()
    # In the pickle a name is preceded by its length in one byte.
    old = blob.replace(bytes([len(name)]) + name, bytes([len(former)]) + former)
    framed = old[:3] + (len(old) - 11).to_bytes(8, "little") + old[11:]
    assert old != blob
    found = manifest.decode(framed, manifest.digest_of(framed))
    assert found == manifest.decode(blob, manifest.digest_of(blob))
