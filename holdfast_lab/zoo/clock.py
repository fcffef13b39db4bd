"""Where a loop is: its steps, seen by hooks of its model and optimizers, and what each step has."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from holdfast import protect, sites
from holdfast.sites import Gemm
from holdfast_lab.zoo.loop import Loop, made


class Watcher:
    """What is told of a loop's steps; by default it does nothing.

    Steps are counted by the calls of the loop's optimizers, from 0.
    """

    def begins(self, step: int) -> None:
        """Take note that the first forward pass of a step in training begins."""

    def applying(self, step: int) -> None:
        """Take note that an optimizer is about to be applied."""

    def applied(self, step: int) -> None:
        """Take note that an optimizer was applied."""


class Clock:
    """Tells a watcher of the steps of a loop while its context is open."""

    def __init__(self, loop: Loop, watcher: Watcher) -> None:
        self._loop, self._watcher = loop, watcher
        self._step, self._begun = 0, False

    def __enter__(self) -> None:
        model = self._loop.model
        with ExitStack() as hooks:
            for root in model if isinstance(model, nn.ModuleList) else (model,):
                hooks.callback(root.register_forward_pre_hook(self._forward).remove)
            for optimizer in self._loop.optimizers:
                hooks.callback(optimizer.register_step_pre_hook(self._applying).remove)
                hooks.callback(optimizer.register_step_post_hook(self._applied).remove)
            self._hooks = hooks.pop_all()

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _forward(self, module: nn.Module, *_: object) -> None:
        if not self._begun and module.training and torch.is_grad_enabled():
            self._begun = True
            self._watcher.begins(self._step)

    def _applying(self, *_: object) -> None:
        self._watcher.applying(self._step)

    def _applied(self, *_: object) -> None:
        self._watcher.applied(self._step)
        self._step, self._begun = self._step + 1, False


@dataclass
class Places:
    """What one step of a loop has in which a fault can be.

    Attributes:
        products: Names of the matrix products, with the dtype of each result.
        modules: Paths of the modules with a floating-point output, with its dtype.
        parameters: Names of the parameters that get a dense gradient.
    """

    products: dict[str, torch.dtype] = field(default_factory=dict)
    modules: dict[str, torch.dtype] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)


class Observer(Watcher):
    """Collects the places of every step of a loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._now = loop, Places()
        self.steps: dict[int, Places] = {}

    def begins(self, step: int) -> None:
        """Collect for this step from now on."""
        self._now = self.steps[step] = Places()

    def applied(self, step: int) -> None:
        """Collect nothing between the steps."""
        self._now = Places()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect while the context is open, under a protection that verifies nothing."""
        model = self._loop.model
        with ExitStack() as undo:
            undo.enter_context(protect(model, verify=False))
            undo.enter_context(sites.injecting(self._product))
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    undo.callback(self._watch_gradient(name, parameter))
            for name, module in [] if self._loop.compiles else model.named_modules():
                if name:
                    undo.callback(self._watch_output(name, module))
            undo.enter_context(Clock(self._loop, self))
            yield

    def _product(self, stage: str, site: str, gemm: Gemm, output: torch.Tensor | None) -> None:
        # Of convolutions only a share of the calls is checked.
        if stage == "output" and output is not None and "/convolution/" not in site:
            self._now.products.setdefault(site, output.dtype)

    def _watch_gradient(self, name: str, parameter: nn.Parameter) -> Callable[[], None]:
        def note(held: torch.Tensor) -> None:
            dense = held.grad is not None and held.grad.layout is torch.strided
            if dense and name not in self._now.parameters:
                self._now.parameters.append(name)

        remove: Callable[[], None] = parameter.register_post_accumulate_grad_hook(note).remove
        return remove

    def _watch_output(self, name: str, module: nn.Module) -> Callable[[], None]:
        def note(_: nn.Module, args: object, output: object) -> None:
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                self._now.modules.setdefault(name, output.dtype)

        return module.register_forward_hook(note).remove


@dataclass(frozen=True)
class Calm:
    """A loop without faults and without holdfast.

    Attributes:
        digest: Digest of its result.
        steps: Places of each step but the first and the last, by the number of the step.
    """

    digest: str
    steps: dict[int, Places]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warning of a schedule before the first step, where a scaler skipped it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*lr_scheduler\.step\(\)")
        yield


def observe(kind: type[Loop]) -> Calm:
    """Run a loop bare, twice: for its result, and for the places of its steps.

    Raises:
        AssertionError: The two runs differ, so that the loop is not deterministic.
    """
    bare = made(kind)
    with quiet():
        bare.bare()
    seen = made(kind)  # seeds the generators again
    observer = Observer(seen)
    with quiet(), observer.watching():
        seen.bare()
    assert bare.digest() == seen.digest(), f"{kind.name} is not deterministic"
    inner = list(observer.steps)[1:-1]
    return Calm(bare.digest(), {step: observer.steps[step] for step in inner})
