"""The places of a model where a campaign injects faults, and the writing of a fault there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from math import prod
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from holdfast import sites
from holdfast.errors import ConfigError
from holdfast.inject.models import BURST_ELEMENTS, LANES, TILE, Corrupt, FaultModel, fault_model

WHAT = ("activation", "input", "product", "weight", "bias", "buffer", "gradient", "optimizer")
PASSING = WHAT[:3]  # tensors that a run computes; the others are named in the model
SAMPLES = ("one", "same", "each")
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
        samples: ``"one"`` fault, ``"same"``: one at the same location of every sample of the batch
            (first dimension), ``"each"``: one at a location of its own in every sample.
        index: Index of the first element; None lets each trial draw it.

    Raises:
        ConfigError: A value is not one of these.
    """

    kind: str | Corrupt = "flip"
    what: str = "activation"
    layers: str | type[nn.Module] | tuple[str | type[nn.Module], ...] = "*"
    samples: str = "one"
    index: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, value, valid in (("what", self.what, WHAT), ("samples", self.samples, SAMPLES)):
            if value not in valid:
                raise ConfigError(f"{name} = {value!r}; use one of {', '.join(valid)}")
        if self.samples != "one" and self.what not in PASSING[:2]:
            raise ConfigError(f"samples = {self.samples!r} is for activation and input only")
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


@dataclass(frozen=True)
class Site:
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

    def __init__(self, faults: Faults, module: nn.Module, generator: torch.Generator) -> None:
        self._faults, self._module, self._generator = faults, module, generator
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
        bias = getattr(self._module, "bias", None)
        if self._faults.kind == "bias_only" and isinstance(bias, torch.Tensor):
            after = self._spread(bias.detach(), data.shape)[where]
        self._undo = data, where, before
        first = {"before": float(before[0]), "after": float(after[0]), "elements": len(flat)}
        self.record = {"index": [int(each[0]) for each in where], **first}
        with torch.inference_mode(data.is_inference()):
            data[where] = after.to(data)

    def _spread(self, bias: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Expand a bias to its layer's output; dimensions may follow that of the channels."""
        module, behind = self._module, 0
        if isinstance(kernel := getattr(module, "kernel_size", None), tuple):
            behind = len(kernel)
        elif hasattr(module, "running_mean") or hasattr(module, "num_groups"):
            behind = len(shape) - 2
        return bias.view(*bias.shape, *[1] * behind).expand(shape)

    def _places(self, data: torch.Tensor, model: FaultModel) -> torch.Tensor:
        """Return the flat positions of the elements to change; none if no element can change."""
        shape, samples = data.shape, 1
        if self._faults.samples != "one":
            samples, shape = shape[0], torch.Size((1, *shape[1:]))
        own = samples if self._faults.samples == "each" else 1
        starts = self._starts(shape, own, data, model)
        passing = self._faults.what in PASSING
        cut = (2 if len(shape) > 3 else len(shape) - 1) if passing else min(1, len(shape) - 1)
        columns = prod(shape[cut:])  # a parameter's row is what belongs to one output channel
        size = shape.numel() // max(1, columns), columns
        regions = [_region(model.extent, size, start) for start in starts]
        picked = regions if len(regions) == samples else regions * samples
        shifted = (region + i * shape.numel() for i, region in enumerate(picked))
        return torch.cat([torch.zeros(0).long(), *shifted])

    def _starts(
        self, shape: torch.Size, number: int, data: torch.Tensor, model: FaultModel
    ) -> list[int]:
        if self._faults.index is not None:
            index = self._faults.index
            if len(index) != len(shape) or not all(
                map(range.__contains__, map(range, shape), index)
            ):
                raise ValueError(f"index {list(index)} is outside")
            return [sum(i * prod(shape[d + 1 :]) for d, i in enumerate(index))] * number
        drawn = torch.randint(shape.numel(), (number, CANDIDATES), generator=self._generator)
        flat = drawn + torch.arange(number).unsqueeze(1) * shape.numel()
        fit = model.eligible(data[torch.unravel_index(flat.to(data.device), data.shape)]).cpu()
        first = drawn.gather(1, fit.int().argmax(1, keepdim=True))
        return first[:, 0].tolist() if fit.any(1).all() else []


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


def first_tensor(value: object) -> torch.Tensor | None:
    """Return the first floating-point tensor in nested containers; None without."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return next((leaf for leaf in leaves if leaf.is_floating_point()), None)
