"""The launches of the native core, with a driver that only records them: no GPU and no Triton."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from case_loops import for_each

import holdfast
from holdfast import native
from holdfast.abft import ledger
from holdfast.abft.gemm.cpu import configured_core
from holdfast.abft.gemm.interception import interception
from holdfast.abft.triton.tolerance import Tolerance

pytestmark = pytest.mark.skipif(native.core is None, reason="the native core is not built")

SLOW_CALL_NS = 25_000  # five times what a call may take, as other work shares the machine
COUNTERS = 20  # place of the counters among the parameters
PARAMETERS = 51
FUNCTION, SHARED, THREADS = 17, 1024, 256

Sums = tuple[torch.Tensor, torch.Tensor]


class Recorded:
    """What the driver was asked for."""

    def __init__(self) -> None:
        self.core = configured_core()
        self.loaded: list[dict[str, Any]] = []
        self.launches: list[tuple[tuple[int, int, int], list[int]]] = []

    def load(self, device: int, variant: Any, dtypes: Any, aligned: Any) -> tuple[int, int, int]:
        self.loaded.append(variant | {"dtypes": dtypes, "aligned": aligned})
        return FUNCTION, SHARED, THREADS

    def launch(
        self, function: int, grid: Any, threads: int, shared: int, values: list[int]
    ) -> None:
        assert (function, threads, shared) == (FUNCTION, THREADS, SHARED)
        self.launches.append((grid, values))


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """Variants that nobody compiles and launches that nobody runs."""
    recorder = Recorded()
    recorder.core.set_kernel_loader(recorder.load)
    recorder.core.record_launches(recorder.launch)
    yield recorder
    recorder.core.record_launches(None)


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.zeros(m, n, dtype=dtype),
        torch.zeros(m, k, dtype=dtype),
        torch.zeros(k, n, dtype=dtype),
    )


def judge(recorded: Recorded, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    encoding = recorded.core.kernel_encode(b)
    tolerance = Tolerance.of(a.dtype, c.dtype, a.shape[1], c.shape[1])
    slot = torch.zeros(1, dtype=torch.int32)
    recorded.core.kernel_judge(c, slot, a, encoding, None, 1.0, 1.0, tolerance)


def test_a_variant_is_loaded_once_and_its_parameters_are_complete(recorded: Recorded) -> None:
    for rows in (256, 256, 512):
        judge(recorded, *operands(rows, 64, 128, torch.bfloat16))
    assert len(recorded.loaded) == 2  # one that encodes and one that verifies
    assert all(len(values) == PARAMETERS for _, values in recorded.launches)
    assert len(recorded.launches) == 6
    judge(recorded, *operands(256, 64, 128, torch.float16))
    assert len(recorded.loaded) == 4


@for_each(
    "columns, start, aligned",
    [(128, 0, True), (128, 8, True), (128, 1, False), (124, 0, False)],
)
def test_only_what_is_aligned_is_read_in_vectors(
    recorded: Recorded, columns: int, start: int, aligned: bool
) -> None:
    recorded.core.set_kernel_loader(recorded.load)
    c = torch.zeros(64, 512, dtype=torch.bfloat16)[:, start : start + columns]
    recorded.loaded.clear()
    judge(
        recorded, c, torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, columns).bfloat16()
    )
    assert recorded.loaded[-1]["aligned"] == (aligned, False, True)


def test_captured_launches_share_no_counters(recorded: Recorded) -> None:
    product = operands(256, 64, 128, torch.float32)
    judge(recorded, *product)
    recorded.core.record_launches(recorded.launch, capturing=True)
    for _ in range(3):
        judge(recorded, *product)
    counters = [values[COUNTERS] for _, values in recorded.launches]
    assert counters[0] == counters[1]  # launches of one stream follow each other
    assert len(set(counters[1:])) == 7


def test_checksums_of_another_product_are_refused(recorded: Recorded) -> None:
    c, a, b = operands(16, 8, 8, torch.float32)
    tolerance = Tolerance.of(a.dtype, c.dtype, 8, 8)
    slot = torch.zeros(1, dtype=torch.int32)
    row_sum, statistics = recorded.core.kernel_encode(b)
    for encoding in ((row_sum.float(), statistics), (row_sum[:, :7], statistics)):
        with pytest.raises(RuntimeError, match="checksums of a product are not contiguous"):
            recorded.core.kernel_judge(c, slot, a, encoding, None, 1.0, 1.0, tolerance)


@for_each(
    "dtype, encode", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)]
)
def test_a_call_takes_little_time_of_the_host(
    recorded: Recorded, dtype: torch.dtype, encode: bool
) -> None:
    c, a, b = operands(64, 64, 64, dtype)
    recorded.core.record_launches(recorded.launch)  # the last case replaced it
    encoding = recorded.core.kernel_encode(b)
    tolerance = Tolerance.of(dtype, dtype, 64, 64)
    slot = torch.zeros(1, dtype=torch.int32)
    took = recorded.core.judge_host_ns(c, slot, a, encoding, tolerance, encode, 2000)
    assert took < SLOW_CALL_NS, took


POINTERS = {"c": 0, "a": 8, "across": 15, "known": 17, "encoded": 22, "summed": 24}
FORWARD, GRAD_A, GRAD_B = "c a encoded", "c a across summed", "c known"
ENCODE, ENCODE_BOTH = "a encoded", "a encoded summed"


def launched(recorded: Recorded) -> list[str]:
    """Which matrices and sums each launch was given, since this was last called."""
    found = [
        " ".join(name for name, place in POINTERS.items() if values[place])
        for _, values in recorded.launches
    ]
    recorded.launches.clear()
    return found


@pytest.fixture
def on_cpu(recorded: Recorded) -> Iterator[Recorded]:
    """Products on CPU are verified by launches that nobody runs, so that every verdict is clean."""
    interception().intercept_device("CPU", "kernels")
    yield recorded
    recorded.core.release_device("CPU")
    recorded.core.forget_all()
    ledger.settle(lambda module: False)


def steps(model: torch.nn.Module, run: torch.nn.Module, recorded: Recorded) -> Iterator[list[str]]:
    """Train, and yield what each step launched."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while True:
        run(torch.ones(16, 64, requires_grad=True)).square().sum().backward()
        optimizer.step()
        yield launched(recorded)


@for_each("bias", [True, False])
def test_a_step_encodes_a_weight_once_and_reads_no_matrix_twice(
    on_cpu: Recorded, bias: bool
) -> None:
    on_cpu.core.set_kernel_loader(on_cpu.load)
    model = torch.nn.Linear(64, 32, bias=bias)
    with holdfast.protect(model):
        training = steps(model, model, on_cpu)
        first = [ENCODE, GRAD_A, GRAD_B] if bias else ["c a", ENCODE, "c a"]
        assert next(training) == [ENCODE, FORWARD, *first]
        for _ in range(2):
            assert next(training) == [ENCODE_BOTH, FORWARD, GRAD_A, GRAD_B]
        if not bias:  # torch computes dW first, whose A is dY transposed
            assert [key["a_layout"] for key in on_cpu.loaded if key["turned"]] == [0]
        with torch.no_grad():
            for expected in ([ENCODE_BOTH, "c a"], ["c a"]):
                model(torch.ones(16, 64))
                assert launched(on_cpu) == expected


def test_dy_is_summed_for_no_other_check_if_x_has_no_gradient(on_cpu: Recorded) -> None:
    model = torch.nn.Linear(64, 32, bias=False)
    with holdfast.protect(model):
        for _ in range(2):
            model(torch.ones(16, 64)).square().sum().backward()
        assert launched(on_cpu) == [ENCODE, FORWARD, "c a", FORWARD, "c a"]


def test_inference_encodes_a_weight_in_one_direction(on_cpu: Recorded) -> None:
    model = torch.nn.Linear(64, 32)
    with holdfast.protect(model), torch.no_grad():
        for _ in range(2):
            model(torch.ones(16, 64))
            assert launched(on_cpu) == [ENCODE, "c a"]
            model.weight.mul_(0.5)


@pytest.mark.compile
@for_each("bias", [True, False])
def test_a_compiled_step_reads_no_gradient_twice(on_cpu: Recorded, bias: bool) -> None:
    model = torch.nn.Linear(64, 32, bias=bias)
    torch.compiler.reset()
    with holdfast.protect(model):
        training = steps(model, torch.compile(model, fullgraph=True), on_cpu)
        assert next(training) == [ENCODE, FORWARD, ENCODE, GRAD_A, GRAD_B]
        for _ in range(2):
            assert next(training) == [ENCODE_BOTH, FORWARD, GRAD_A, GRAD_B]
    torch.compiler.reset()
