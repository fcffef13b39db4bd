"""Digests: what an XOR digest misses, every single bit, every dtype, structure."""

import subprocess
import sys
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import torch
from case_loops import for_each

import holdfast.digest.tensors
from holdfast.digest import digest
from holdfast.digest.tensors import state_digest, tensor_bytes, tensor_digest, tensors_digest

INTEGERS = torch.tensor([3, 14, 15, 92, 65, 35], dtype=torch.int32)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@for_each(
    "damaged",
    [
        INTEGERS[[1, 0, 2, 3, 4, 5]],
        INTEGERS.flip(0),
        INTEGERS ^ torch.tensor([0, 1 << 20, 0, 0, 1 << 20, 0], dtype=torch.int32),
    ],
)
def test_damage_that_an_xor_digest_misses_is_seen(damaged):
    words = [np.frombuffer(tensor_bytes(tensor), np.uint32) for tensor in (damaged, INTEGERS)]
    assert np.bitwise_xor.reduce(words[0]) == np.bitwise_xor.reduce(words[1])
    assert tensor_digest(damaged) != tensor_digest(INTEGERS)
    assert tensors_digest([damaged]) != tensors_digest([INTEGERS])
    assert state_digest({"w": damaged}) != state_digest({"w": INTEGERS})


def test_signed_zeros_nan_payloads_and_the_last_bit_count():
    assert state_digest([0.1 + 0.2]) != state_digest([0.3])
    assert state_digest([0.0]) != state_digest([-0.0])
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))
    patterns = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert patterns.isnan().all()
    assert tensor_digest(patterns[0]) != tensor_digest(patterns[1])


@for_each("dtype", DTYPES)
def test_every_dtype_has_a_digest(dtype):
    tensor = torch.tensor([0.0, 1.0, 1.0, 0.0]).to(dtype)
    assert tensor_bytes(tensor).nbytes == tensor.nbytes
    assert tensor_digest(tensor) == tensor_digest(tensor.clone())
    assert tensor_digest(tensor) != tensor_digest(torch.tensor([1.0, 1.0, 1.0, 0.0]).to(dtype))


def test_empty_and_zero_dimensional_tensors():
    assert tensor_bytes(torch.empty(0, 3)).nbytes == 0
    assert tensor_digest(torch.empty(0)) == tensor_digest(torch.empty(0, 3, dtype=torch.bfloat16))
    assert tensors_digest([torch.empty(0)]) != tensors_digest([torch.empty(0, 3)])
    assert tensors_digest([torch.empty(0)]) != tensors_digest([])
    assert tensor_bytes(torch.tensor(1.0)).tobytes() == b"\x00\x00\x80\x3f"


def test_elements_count_in_their_logical_order_whatever_the_strides():
    base = torch.arange(24.0).reshape(4, 6)
    for view in (
        base.t(),
        base[::2, 1::2],
        base[:, :1].expand(4, 3),
        base.t()[1:, 2:],
        base[1:2, ::6],
    ):
        assert tensor_digest(view) == tensor_digest(view.contiguous())
    assert tensor_digest(base.t()) != tensor_digest(base)


def test_contiguous_cpu_memory_is_not_copied():
    tensor = torch.zeros(4, requires_grad=True)
    view = tensor_bytes(tensor)
    tensor.data[0] = 1.0
    assert view[:4].tobytes() == b"\x00\x00\x80\x3f"


def test_shape_dtype_order_and_absence_count():
    one, two = torch.zeros(2, 3), torch.ones(2, 3)
    variants = [
        [one, two],
        [two, one],
        [one.reshape(3, 2), two],
        [one.to(torch.int32), two],
        [one, None, two],
        [one, two, None],
        [one],
        [],
    ]
    digests = {tensors_digest(variant) for variant in variants}
    assert len(digests) == len(variants)
    assert tensors_digest(iter([one, two])) == tensors_digest((one, two))


def test_state_structure_and_values_count():
    tensor = torch.arange(3.0)
    variants = [
        {"a": tensor, "b": 1},
        {"b": 1, "a": tensor},
        {"a": tensor, "b": 1.0},
        {"a": tensor, "b": True},
        {"a": tensor, "b": "1"},
        {"a": tensor, "b": None},
        {"a": tensor, "b": [1]},
        {"a": tensor, "b": (1,)},
        {"a": tensor, "b": {}},
        {"a": tensor},
        {"a": tensor.reshape(1, 3), "b": 1},
        {"a": tensor.tolist(), "b": 1},
        [tensor, 1],
        [[tensor], 1],
        [[tensor, 1]],
    ]
    digests = [state_digest(variant) for variant in variants]
    assert len(set(digests)) == len(variants)
    assert digests == [state_digest(variant) for variant in variants]


def test_ordered_dicts_and_arrays_are_read_by_content():
    assert state_digest(OrderedDict(a=1)) == state_digest({"a": 1})
    array = np.arange(6).reshape(2, 3)
    assert state_digest(array[:, ::-1]) == state_digest(array[:, ::-1].copy())
    assert state_digest(array[:, ::-1]) != state_digest(array)


TRAINED = """
import torch
from holdfast.digest.tensors import state_digest
generator = torch.Generator().manual_seed(0)
model = torch.nn.Linear(3, 2)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
digest = state_digest([model.state_dict(), optimizer.state_dict(), generator.get_state()])
"""


def test_a_training_state_keeps_its_digest_in_another_process():
    here: dict[str, str] = {}
    exec(TRAINED, here)
    there = subprocess.run(
        [sys.executable, "-c", TRAINED + "print(digest)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(here["digest"]) == 32
    assert there.stdout.strip() == here["digest"]


def test_tensors_on_a_device_are_digested_there_and_moved_once(monkeypatch):
    """Of a device only digests come to the host; the value is that of the same bits on a CPU."""
    held = [torch.arange(5.0), None, torch.ones(2, 2).bfloat16(), torch.arange(3)]
    state = {"tensors": held, "text": "x", "set": {1, 2}, "array": np.arange(3)}
    expected = tensors_digest(held), state_digest(state)
    calls = []

    def digests(tensors):
        calls.append(len(tensors))
        return [digest(tensor.flatten().view(torch.uint8).numpy()) for tensor in tensors]

    fake = SimpleNamespace(digests=digests)
    monkeypatch.setitem(sys.modules, "holdfast.digest.cuda", fake)
    monkeypatch.setattr(holdfast.digest, "cuda", fake, raising=False)
    monkeypatch.setattr(holdfast.digest.tensors, "is_on_device", lambda tensor: True)
    assert (tensors_digest(held), state_digest(state)) == expected
    assert calls == [3, 4]
