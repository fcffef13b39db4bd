"""The places of a model where a campaign injects faults, and the writing of a fault there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from math import prod
from typing import Literal, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast import sites
from holdfast.errors import ConfigError
from holdfast.inject.models import BURST_ELEMENTS, LANES, TILE, Corrupt, FaultModel, fault_model
from holdfast.inject.outcomes import first_tensor

WHAT = ("activation", "input", "product", "weight", "bias", "buffer", "gradient", "optimizer")
PASSING = WHAT[:3]  # tensors that a run computes; the others are named in the model
CANDIDATES = 64


@dataclass(frozen=True)
class Faults:
    """The faults that a campaign draws from: what happens to which values of which layers.

    Args:
        kind: Name of a fault model (``docs/campaigns.md`` lists them), or a function of the right
            values, [1, elements] on CPU, and a ``torch.Generator`` that returns the wrong values.
        what: ``"activation"`` (a layer's first output) or ``"input"`` (its first argument), at any
            of its calls; ``"weight"`` (every parameter but biases), ``"bias"`` or ``"buffer"``
            before the run; ``"gradient"`` of a parameter before the optimizer uses it;
            ``"optimizer"`` (its state); ``"product"``: of a protected model, a matrix product
            before it is verified.
        layers: Pattern of module paths (``"layer4.*"``), a type, or a tuple of these. Of a pattern
            with ``*``, layers without children only.
        index: Of the first element; None lets each trial draw it. ``"same"`` draws one location for
            every sample of the batch (first dimension), ``"each"`` one of its own in every sample.

    Raises:
        ConfigError: A value is not one of these.
    """

    kind: str | Corrupt = "flip"
    what: str = "activation"
    layers: str | type[nn.Module] | tuple[str | type[nn.Module], ...] = "*"
    index: tuple[int, ...] | Literal["same", "each"] | None = None

    def __post_init__(self) -> None:
        if self.what not in WHAT:
            raise ConfigError(f"what = {self.what!r}; use one of {', '.join(WHAT)}")
        if isinstance(self.index, str) and self.index not in ("same", "each"):
            raise ConfigError(f"index = {self.index!r}; use one of same, each, or an index")
        if isinstance(self.index, str) and self.what not in PASSING[:2]:
            raise ConfigError(f"index = {self.index!r} is for activation and input only")
        try:
            self.model(torch.float64)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def name(self) -> str:
        """Name of the fault model."""
        return self.kind if isinstance(self.kind, str) else getattr(self.kind, "__name__", "own")

    def model(self, dtype: torch.dtype) -> FaultModel:
        """Return the fault model for a dtype."""
        kind = self.kind
        return fault_model(kind, dtype) if isinstance(kind, str) else FaultModel("element", kind)

    def strikes(self, site: "Site", module: nn.Module) -> bool:
        """Return whether these faults are injected at a site of a module."""
        wanted = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        leaf = site.what not in PASSING[:2] or next(module.children(), None) is None
        leaf = leaf and site.layer != sites.OUTSIDE  # products of no module of a protected model
        return site.what == self.what and any(
            (site.layer == each or (leaf and fnmatchcase(site.layer, each)))
            if isinstance(each, str)
            else isinstance(module, each)
            for each in wanted
        )


class Site(NamedTuple):
    """A place for faults: the path of its layer, what it is, and its name within the layer."""

    layer: str
    what: str
    name: str = ""


def named_sites(
    model: nn.Module, optimizer: Optimizer | None
) -> Iterator[tuple[Site, torch.Tensor]]:
    """Yield the sites that have a tensor before a run, with it; of a gradient, the parameter."""
    for path, parameter in model.named_parameters():
        layer, _, name = path.rpartition(".")
        yield Site(layer, "bias" if name.endswith("bias") else "weight", name), parameter
        if parameter.requires_grad:
            yield Site(layer, "gradient", name), parameter
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield Site(layer, "optimizer", f"{name}.{key}"), value
    for path, buffer in model.named_buffers():
        layer, _, name = path.rpartition(".")
        yield Site(layer, "buffer", name), buffer


class Watch:
    """Hooks on every module of a model, which call ``act`` with each site and its tensor.

    They stay for all runs, with a fault or without: torch computes some modules by other kernels,
    with other last bits, where there are hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._act: Callable[[Site, torch.Tensor], object] | None = None
        self._stack = ExitStack()
        for path, module in model.named_modules():
            before = partial(self._passing, Site(path, "input"))
            after = partial(self._passing, Site(path, "activation"))
            self._stack.callback(module.register_forward_hook(after).remove)
            pre = module.register_forward_pre_hook(before, with_kwargs=True)
            self._stack.callback(pre.remove)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def acting(self, act: Callable[[Site, torch.Tensor], object], products: bool) -> Iterator[None]:
        """Call ``act`` while the context is open, with ``products`` also for matrix products."""
        self._act = act
        if products:
            sites.arm(self._product, ("output",))
        try:
            yield
        finally:
            self._act = None
            if products:
                sites.disarm()

    def _product(self, stage: str, name: str, gemm: object, output: torch.Tensor | None) -> None:
        layer, *rest = name.rsplit("/", 2)
        self._passing(Site(layer, "product", "/".join(rest)), None, output)

    def _passing(self, site: Site, module: object, *values: object) -> None:
        tensor = first_tensor(values if site.what == "input" else values[-1])
        if tensor is not None and self._act is not None:
            self._act(site, tensor)


@contextmanager
def striking(
    tensors: dict[Site, torch.Tensor], watch: Watch, site: Site, call: int, strike: "Strike"
) -> Iterator[None]:
    """Inject a fault at a call of a site, or in what the site holds, while the context is open."""
    calls = count()

    def act(at: Site, tensor: torch.Tensor) -> None:
        if at == site and next(calls) == call:
            strike(tensor)

    with ExitStack() as stack:
        if site.what in PASSING:
            stack.enter_context(watch.acting(act, products=site.what == "product"))
        elif site.what == "gradient":
            hook = tensors[site].register_post_accumulate_grad_hook(lambda held: strike(held.grad))
            stack.callback(hook.remove)
        else:
            strike(tensors[site])
        yield


class Strike:
    """One fault, which is written into the first tensor that it is called with.

    Attributes:
        reached: Whether it was called.
        record: Index of the first changed element, its value before and after, and the number of
            changed elements; empty if no element can have the fault.
    """

    def __init__(
        self, faults: Faults, site: Site, module: nn.Module, generator: torch.Generator
    ) -> None:
        self._faults, self._generator = faults, generator
        # Only in what a layer computes forward is its bias left where the rest is lost.
        forward = site.what in ("activation", "product") and "/grad" not in site.name
        self._biased = module if forward and faults.kind == "bias_only" else None
        self._undo: tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor] | None = None
        self.record: dict[str, object] = {}
        self.reached = False

    def __call__(self, tensor: torch.Tensor) -> None:
        """Write the fault, behind autograd's back as ``write_element`` does, if it was not yet."""
        if self.reached:
            return
        self.reached = True
        try:
            self._write(tensor)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            shape = f"{tensor.dtype} {list(tensor.shape)}"
            raise ConfigError(f"cannot inject {self._faults} into {shape}: {error}") from error

    def undo(self) -> None:
        """Write the right values back."""
        if self._undo is not None:
            data, where, values = self._undo
            with torch.inference_mode(data.is_inference()):
                data[where] = values

    def _write(self, tensor: torch.Tensor) -> None:
        model = self._faults.model(tensor.dtype)
        # .data has a version counter of its own; a scalar is taken as a vector of one element.
        data = tensor.data if tensor.dim() else tensor.data.view(1)
        flat = self._places(data, model)
        if not len(flat):
            return
        where = torch.unravel_index(flat.to(data.device), data.shape)
        before = data[where]
        after = model.corrupt(before.cpu().view(1, -1), self._generator).view(-1)
        bias = getattr(self._biased, "bias", None)
        if self._biased is not None and isinstance(bias, torch.Tensor):
            after = _spread(bias.detach(), self._biased, data.shape)[where]
        self._undo = data, where, before
        first = {"before": float(before[0]), "after": float(after[0]), "elements": len(flat)}
        self.record = {"index": [int(each[0]) for each in where], **first}
        with torch.inference_mode(data.is_inference()):
            data[where] = after.to(data)

    def _places(self, data: torch.Tensor, model: FaultModel) -> torch.Tensor:
        """Return the flat positions of the elements to change; none if no element can change."""
        shape, index = data.shape, self._faults.index
        size = shape[1:].numel() if isinstance(index, str) else shape.numel()
        # A row of a parameter is what belongs to one output channel.
        behind = min(1, len(shape) - 1) if self._faults.what not in PASSING else len(shape) - 1
        columns = prod(shape[2 if behind > 2 else behind :])
        matrix = size // max(1, columns), columns
        starts = [_position(index, shape)] if isinstance(index, tuple) else self._drawn(data, model)
        if index == "same":
            starts = [start + sample * size for start in starts for sample in range(shape[0])]
        regions = (_region(model.extent, matrix, at % size) + at // size * size for at in starts)
        return torch.cat([torch.zeros(0).long(), *regions])

    def _drawn(self, data: torch.Tensor, model: FaultModel) -> list[int]:
        """Draw the flat position of an element that can have the fault, or one of each sample."""
        sample = data.shape[1:].numel() if isinstance(self._faults.index, str) else data.numel()
        number = len(data) if self._faults.index == "each" else 1
        drawn = torch.randint(sample, (number, CANDIDATES), generator=self._generator)
        flat = drawn + torch.arange(number).unsqueeze(1) * sample
        fit = model.eligible(data[torch.unravel_index(flat.to(data.device), data.shape)]).cpu()
        first = flat.gather(1, fit.int().argmax(1, keepdim=True))
        return first[:, 0].tolist() if fit.any(1).all() else []


def _position(index: tuple[int, ...], shape: torch.Size) -> int:
    if len(index) != len(shape) or not all(
        i in range(n) for i, n in zip(index, shape, strict=True)
    ):
        raise ValueError(f"index {list(index)} is outside")
    return sum(i * prod(shape[d + 1 :]) for d, i in enumerate(index))


def _spread(bias: torch.Tensor, layer: nn.Module, shape: torch.Size) -> torch.Tensor:
    """Expand a bias to its layer's output; dimensions may follow that of the channels."""
    behind = 0
    if isinstance(kernel := getattr(layer, "kernel_size", None), tuple):
        behind = len(kernel)
    elif hasattr(layer, "running_mean") or hasattr(layer, "num_groups"):
        behind = len(shape) - 2
    return bias.view(*bias.shape, *[1] * behind).expand(shape)


def _region(extent: str, size: tuple[int, int], start: int) -> torch.Tensor:
    """Return the flat positions of a fault's elements in a matrix, given that of the first."""
    row, column = divmod(start, size[1])
    burst = max(0, min(column, size[1] - BURST_ELEMENTS))
    one_row, one_column, whole = slice(row, row + 1), slice(column, column + 1), slice(None)
    rows, columns = {
        "element": (one_row, one_column),
        "burst": (one_row, slice(burst, burst + BURST_ELEMENTS)),
        "lane": (one_row, slice(column % LANES, None, LANES)),
        "row": (one_row, whole),
        "column": (whole, one_column),
        "tile": (slice(row, row + TILE), slice(column, column + TILE)),
        "rows_beyond": (slice(row, None), whole),
    }[extent]
    return (torch.arange(size[0])[rows, None] * size[1] + torch.arange(size[1])[columns]).flatten()
