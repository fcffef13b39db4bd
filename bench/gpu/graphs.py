"""The stage that runs protected steps without waiting and in graphs of CUDA."""

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from bench.gpu.stage import Machine, Row, demand, unverified
from bench.gpu.strike import Added
from holdfast.digest.tensors import tensors_digest
from holdfast.errors import UncorrectableFault
from holdfast.protection import Protection
from holdfast.sites import injecting

REPLAYS = 100


def captured(machine: Machine, done: Collection[str]) -> Iterator[Row]:
    """Run a protected step without waiting, then in graphs of CUDA, where a fault is found."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to(machine.device)
    x = torch.randn(256, 512, device=machine.device)

    def step(run: Callable[..., torch.Tensor] = model) -> None:
        run(x).square().mean().backward()

    with machine.protected(model) as protection:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        except RuntimeError as error:
            demand("synchroniz" not in str(error), f"a protected step waits: {error}")
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
        protection.check()
        yield {"case": "no waiting"}
        yield replayed("graph", model, protection, lambda amount: _graph(step, amount))
        torch.compiler.reset()
        run = torch.compile(model, mode="reduce-overhead")

        def replay() -> None:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            model.zero_grad()
            step(run)

        def recorded(amount: torch.Tensor) -> Callable[[], object]:
            for _ in range(4):  # compiles, warms up, records, and replays
                replay()
            return replay

        yield replayed("reduce-overhead", model, protection, recorded)
        demand(not unverified(protection), f"not verified: {unverified(protection)}")


def _graph(step: Callable[[], None], amount: torch.Tensor) -> Callable[[], object]:
    """Capture a step as torch's documentation does."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def replayed(
    case: str,
    model: nn.Module,
    protection: Protection,
    record: Callable[[torch.Tensor], Callable[[], object]],
) -> Row:
    """Replay a step without a fault, with one and without again, and look at its gradients."""
    # What is added to a product in every replay.
    amount = torch.zeros((), device=next(model.parameters()).device)
    model.zero_grad()
    with injecting(Added(lambda gemm, c: amount.to(c.dtype), site="addmm/forward")):
        replay = record(amount)

    def digest() -> str:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        replay()
        gradients = [parameter.grad for parameter in model.parameters()]
        return tensors_digest([each for each in gradients if each is not None])

    right = digest()
    for _ in range(REPLAYS):
        replay()
    protection.check()
    amount.fill_(1e6)
    wrong = digest()
    demand(wrong != right, f"{case}: the fault in a replay changed no gradient")
    try:
        protection.check()
    except UncorrectableFault:
        amount.zero_()
    else:
        demand(False, f"{case}: a fault in a replay was missed")
    demand(digest() == right, f"{case}: a replay after the fault differs from those before it")
    protection.check()
    return {"case": case, "replays": REPLAYS}
