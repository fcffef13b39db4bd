"""Every product of known models has one verdict or one line NOT COVERED in the report.

Nothing is computed: the tensors are on the meta device or are fakes of CUDA tensors, which need no
GPU. Which operators are products is taken from torch's own counter of floating-point operations.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case_loops import for_each
from site_reports import covered, uncovered
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import holdfast
from holdfast.abft.coverage import unverified_device
from holdfast.abft.gemm import compiled
from holdfast.abft.gemm.graph_sites import (
    FORWARD,
    GEMMS,
    GRAD_A,
    GRAD_B,
    ON_DEVICES,
    product_of,
    site_of,
)
from holdfast.abft.gemm.interception import interception
from holdfast.abft.gemm.other_devices import COMPILED, _is_checked
from holdfast.protection import Protection

aten = torch.ops.aten
PRODUCTS = {*flop_registry, aten._int_mm, aten._grouped_mm, aten.mv, aten.dot}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class Dlrm(nn.Module):
    """A small recommendation model: embedding bags, two perceptrons, pairwise dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(10, 8) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(17, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(x)
        ids = torch.zeros(len(x), 3, dtype=torch.long, device=x.device)
        rows = torch.stack([dense, *(bag(ids) for bag in self.bags)], 1)
        pairs = (rows @ rows.mT).flatten(1)
        result: torch.Tensor = self.top(torch.cat([dense, pairs], 1))
        return result


def from_transformers(name: str, **settings: object) -> nn.Module:
    """A model of the transformers package, with random weights."""
    transformers = pytest.importorskip(
        "transformers", "5.23", reason="the extra 'models' is not installed"
    )
    for_class, config = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
        "bert": ("BertForMaskedLM", "BertConfig"),
        "llama": ("LlamaForCausalLM", "LlamaConfig"),
        "vit": ("ViTForImageClassification", "ViTConfig"),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
    }[name]
    model: nn.Module = getattr(transformers, for_class)(
        getattr(transformers, config)(bos_token_id=0, eos_token_id=0, **settings)
    )
    return model


WORDS = {"vocab_size": 64, **SMALL}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dlrm": Dlrm,
    "gpt2": lambda: from_transformers(
        "gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16
    ),
    "bert": lambda: from_transformers("bert", **WORDS),
    "llama": lambda: from_transformers("llama", num_key_value_heads=1, **WORDS),
    "vit": lambda: from_transformers("vit", image_size=16, patch_size=8, **SMALL),
    "mixtral": lambda: from_transformers(
        "mixtral", num_key_value_heads=1, num_local_experts=4, **WORDS
    ).bfloat16(),
}


# One model belongs to every run; those of transformers take seconds to import.
EACH_MODEL = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.representative] if name == "dlrm" else [])
        for name in MODELS
    ],
)


def meta_model(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def inputs(name: str, device: str) -> torch.Tensor:
    if name == "vit":
        return torch.empty(2, 3, 16, 16, device=device)
    if name == "dlrm":
        return torch.empty(2, 4, device=device)
    return torch.zeros(2, 8, dtype=torch.long, device=device)


def loss_of(output: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(output, "logits", output).sum()
    return result


def is_product(op: Any) -> bool:
    return op in PRODUCTS or getattr(op, "overloadpacket", None) in PRODUCTS


class Recorder(TorchDispatchMode):
    """Counts the products that are dispatched, by the name of the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_product(func):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def listed(protection: Protection) -> Counter[str]:
    """Calls of the products that are listed as not covered, by the name of the operator."""
    calls = Counter[str]()
    for site in protection.report().sites:
        assert not site.covered
        if "/" in site.site:
            calls[site.site.split("/")[1]] += site.calls
    return calls


@pytest.mark.compile
@EACH_MODEL
def test_every_product_of_a_forward_pass_on_another_device_is_listed(name: str) -> None:
    model = meta_model(name)
    with holdfast.protect(model) as protection:
        with Recorder() as recorder:
            output = model(inputs(name, "meta"))
        loss_of(output).backward()
        assert listed(protection) == recorder.calls
    assert recorder.calls.total() > 3


class OwnDevice(nn.Module):
    """Multiplies on the device of its weight, or of its input if it has none."""

    def __init__(self, device: str, weight: str = "parameter") -> None:
        super().__init__()
        ones = torch.ones(4, 4, device=device)
        if weight == "buffer":
            self.register_buffer("weight", ones)
        else:
            self.weight = nn.Parameter(ones) if weight == "parameter" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operand = x if self.weight is None else self.weight
        return operand.mm(operand)


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = OwnDevice("meta").weight


def replace_module(model: nn.Sequential) -> None:
    model[0] = OwnDevice("meta")


LEAVE: dict[str, Callable[[nn.Sequential], object]] = {
    "to": lambda model: model.to("meta"),
    "parameter": replace_parameter,
    "module": replace_module,
    "input": lambda model: None,
    "buffer": lambda model: model.to("meta"),
}


@for_each("way", LEAVE)
def test_a_product_on_another_device_is_listed_after_many_passes_on_cpu(way: str) -> None:
    weight = {"input": "", "buffer": "buffer"}.get(way, "parameter")
    model = nn.Sequential(OwnDevice("cpu", weight))
    with holdfast.protect(model) as protection:
        for _ in range(10):
            model(torch.ones(4, 4))
        assert uncovered(protection.report()) == {}
        LEAVE[way](model)
        model(torch.ones(4, 4, device="meta" if way == "input" else "cpu"))
        # A module that is new in the model has no name of its own.
        path = "Sequential" if way == "module" else "0"
        assert uncovered(protection.report()).keys() == {f"{path}/mm/forward"}


@for_each("weight", ["parameter", "buffer"])
def test_a_pass_does_not_walk_through_all_modules(
    monkeypatch: pytest.MonkeyPatch, weight: str
) -> None:
    model = nn.Sequential(nn.ReLU(), OwnDevice("cpu", weight))
    with holdfast.protect(model):
        model(torch.ones(4, 4))
        walked: list[nn.Module] = []
        walk = nn.Module.named_modules

        def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            walked.append(self)
            return walk(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "named_modules", noted)
        model(torch.ones(4, 4))
    assert model not in walked


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor on CUDA without values; to be called within a FakeTensorMode."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def scaled_mm() -> torch.Tensor:
    a, b = (fake(16, 16, dtype=torch.float8_e4m3fn) for _ in range(2))
    one = fake(dtype=torch.float32)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def grouped_mm() -> torch.Tensor:
    ends = fake(2, dtype=torch.int32)
    return torch._grouped_mm(fake(8, 16), fake(2, 16, 8), ends)


def heads() -> list[torch.Tensor]:
    return [fake(1, 2, 8, 16) for _ in range(3)]


# By a part of the name that their site bears.
FUNCTIONAL: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: torch.mm(fake(4, 8), fake(8, 4)),
    "addmm": lambda: torch.addmm(fake(4), fake(4, 8), fake(8, 4)),
    "bmm": lambda: torch.bmm(fake(2, 4, 8), fake(2, 8, 4)),
    "baddbmm": lambda: torch.baddbmm(fake(4), fake(2, 4, 8), fake(2, 8, 4)),
    "mv": lambda: torch.mv(fake(4, 8), fake(8)),
    "dot": lambda: torch.dot(fake(8), fake(8)),
    "matmul": lambda: fake(2, 4, 8) @ fake(8, 4),
    "linear": lambda: F.linear(fake(4, 8), fake(4, 8)),
    "einsum": lambda: torch.einsum("ij,jk", fake(4, 8), fake(8, 4)),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(*heads()),
    "flash_attention": lambda: aten._scaled_dot_product_flash_attention(*heads())[0],
    "efficient_attention": lambda: aten._scaled_dot_product_efficient_attention(
        *heads(), None, False
    )[0],
    "_scaled_mm": scaled_mm,
    "_grouped_mm": grouped_mm,
    "_int_mm": lambda: torch._int_mm(*(fake(32, 32, dtype=torch.int8) for _ in range(2))),
    "conv2d": lambda: F.conv2d(fake(1, 3, 8, 8), fake(4, 3, 3, 3)),
}


class Calling(nn.Module):
    """A model that calls one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function()


@for_each("name", FUNCTIONAL)
def test_a_functional_product_on_cuda_is_listed(name: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        with holdfast.protect(Calling(FUNCTIONAL[name])) as protection:
            protection.model(fake(1))
        rows = protection.report().sites
    (row,) = rows
    path, op, role = row.site.split("/")
    assert (path, role, row.covered) == ("Calling", "forward", False)
    assert name in op or op in ("mm", "bmm", "convolution")  # what torch decomposes it into
    assert row.calls == (2 if name == "scaled_dot_product_attention" else 1)
    assert row.reason == f"{unverified_device('cuda', op)}; nor are its gradients"
    assert ("attention='fused'" in row.reason) == ("attention" in op)


def test_compiled_code_has_one_line_where_its_products_are_not_listed() -> None:
    model = meta_model("dlrm")
    model.compile(backend="eager")
    with holdfast.protect(model) as protection:
        protection._elsewhere.begin((inputs("dlrm", "meta"),))
        one_by_one = {unverified_device("meta")}
        assert [row.site for row in protection._elsewhere.sites()] == [f"Dlrm/{COMPILED}/forward"]
        assert protection._elsewhere.sites(listed=one_by_one) == []


@pytest.fixture
def _no_graph_of_another_test() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def on_device(graph: Graph, device: str) -> None:
    """Say in a graph's metadata that all its tensors are on a device."""

    def moved(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    with detect_fake_mode() or FakeTensorMode():
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(moved, node.meta["val"])


def traced(model: nn.Module, x: torch.Tensor, device: str) -> list[Graph]:
    """Run holdfast's passes on the graphs of a training step, as though all were on a device.

    Returns the joint graph, its forward half and its backward half.
    """
    torch.compiler.reset()
    if hasattr(model, "config"):
        model.config.use_cache = False  # Dynamo cannot trace one on the meta device
    graphs: list[Graph] = []

    def partition(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        on_device(module.graph, device)
        compiled._label(module.graph)
        compiled._hand_over(module.graph)
        graphs.append(copy.deepcopy(module.graph))
        return min_cut_rematerialization_partition(module, *args, **kwargs)

    def half(module: GraphModule, _: Any) -> Any:
        graph = copy.deepcopy(module.graph)
        on_device(graph, device)
        compiled._release(graph)
        compiled._replace(graph)
        graphs.append(graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=half, bw_compiler=half, partition_fn=partition)
    output = torch.compile(model, backend=backend, fullgraph=True)(x)
    loss_of(output).backward()
    return graphs


def is_backward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


@pytest.mark.compile
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_no_graph_of_another_test")
@for_each("name", ["dlrm", "mixtral"])
def test_every_product_of_compiled_graphs_on_an_unverified_device_is_listed(name: str) -> None:
    model = meta_model(name)
    with holdfast.protect(model) as protection:
        joint, *halves = traced(model, inputs(name, "meta"), "cuda")
        report = protection.report()
    assert len(halves) == 2
    gemms = [node for node in joint.nodes if node.target in GEMMS]
    others = [n for n in joint.nodes if is_product(n.target) and n.target not in GEMMS]
    by_site = {site: why for site, why in uncovered(report).items() if "/" in site}
    assert len(by_site) == len(gemms) + sum(not is_backward(node) for node in others) > 0
    for site, reason in by_site.items():
        assert reason.startswith(unverified_device("cuda", site.split("/")[1]))
    assert covered(report) == {}


@pytest.fixture
def _verified_cuda() -> Iterator[None]:
    """CUDA as a device whose products are verified, though this build of torch may have none."""
    core = interception()
    core.intercept_device("CUDA", "aten")
    yield
    core.release_device("CUDA")


def verdicts(node: torch.fx.Node) -> list[tuple[Any, ...]]:
    """The product, its operands and its site of each verdict that a node queues."""
    name = str(node.target)
    if name in ("holdfast.verdict.default", "holdfast.verdict_and_encoding.default"):
        return [node.args[:10]]
    if name.startswith("holdfast.verdict_of_") and "gradients" not in name:
        return [(node.args[0], *node.args[5:], *node.args[1:5])]
    if name != "holdfast.verdict_of_gradients.default":
        return []
    dx, dw, site = node.args[:6], node.args[6:12], node.args[12:15]
    return [(*dx, *site, GRAD_A), (*dw, *site, GRAD_B)]


UNCHECKED: list[Callable[[], torch.Tensor]] = [
    lambda: torch.mm(fake(4, 8), fake(8, 4), out_dtype=torch.float32),
    lambda: torch.bmm(fake(2, 4, 8), fake(2, 8, 4), out_dtype=torch.float32),
]


@pytest.mark.usefixtures("_verified_cuda")
@pytest.mark.parametrize("product", UNCHECKED)
def test_a_product_of_another_dtype_is_listed_where_products_are_verified(
    product: Callable[[], torch.Tensor],
) -> None:
    def both() -> torch.Tensor:
        FUNCTIONAL["mm"]()  # which the native core counts as it runs
        return product()

    with FakeTensorMode(), torch.no_grad():
        with holdfast.protect(Calling(both)) as protection:
            protection.model(fake(1))
        (row,) = protection.report().sites
    assert row.calls == 1
    assert row.reason == f"{unverified_device('cuda')}; nor are its gradients"


def test_kernels_of_sparse_and_nested_operands_have_no_checks() -> None:
    dense = torch.ones(2, 2)
    nested = torch.nested.nested_tensor([dense, dense])
    for others, checked in (([dense], True), ([dense.to_sparse()], False), ([nested], False)):
        assert _is_checked(aten.mm.default, "mm", [dense, *others]) is checked


@pytest.mark.compile
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_no_graph_of_another_test", "_verified_cuda")
@EACH_MODEL
def test_every_product_of_compiled_graphs_on_cuda_has_one_verdict_or_one_line(name: str) -> None:
    model = meta_model(name)
    with holdfast.protect(model) as protection:
        joint, *halves = traced(model, inputs(name, "meta"), "cuda")
        listed_sites = [site for site in uncovered(protection.report()) if "/" in site]
    sites = [site_of(node) for node in joint.nodes if product_of(node)]
    judged = []
    for node in (node for half in halves for node in half.nodes if product_of(node)):
        (given,) = (each for verdict in node.users for each in verdicts(verdict) if each[0] is node)
        addend = node.args[0] if len(node.args) == 3 else None
        operands = (*node.args[-2:], addend, 1, 1) if node.target in GEMMS else node.args
        assert given[1:-4] == operands
        judged.append(given[-4:])
    assert sorted(judged) == sorted(sites)
    assert len(set(judged)) == len(judged) > 0
    assert any(node.target in ON_DEVICES for node in joint.nodes) == (name == "mixtral")
    others = [n for n in joint.nodes if is_product(n.target) and not product_of(n)]
    assert len(listed_sites) == sum(not is_backward(node) for node in others)
    # Both products of the backward pass of a linear layer have one check, if it needs both.
    matrices = {site_of(n) for n in joint.nodes if n.target in GEMMS and n.meta["val"].dim() == 2}
    both = [site[:3] for site in matrices if site[3] == GRAD_A and (*site[:3], GRAD_B) in matrices]
    together = [node for node in halves[1].nodes if len(verdicts(node)) == 2]
    assert sorted(node.args[12:15] for node in together) == sorted(both)
    assert len(both) > 0
    # The gradient of each of its weights is checked with the encoding that the forward check made.
    made = [
        n for n in halves[0].nodes if n.target is torch.ops.holdfast.verdict_and_encoding.default
    ]
    trained = {site for site in matrices if site[3] == GRAD_B and (*site[:3], FORWARD) in matrices}
    given_encodings = [(*n.args[12:15], GRAD_B) for n in together if n.args[15].op == "placeholder"]
    given_encodings += [
        n.args[6:10]
        for n in halves[1].nodes
        if n.target is torch.ops.holdfast.verdict.default and n.args[10] is not None
    ]
    assert sorted(given_encodings) == sorted(trained)
    outputs = pytree.tree_leaves(halves[0].output_node().args)
    assert all(node in outputs for node in made)
    unwanted = {"holdfast.encoding.default", "holdfast.carried.default", "holdfast.handed.default"}
    assert unwanted.isdisjoint(str(node.target) for half in halves for node in half.nodes)


@pytest.mark.compile
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_no_graph_of_another_test")
@for_each("name", ["dlrm", "gpt2", "mixtral"])
def test_every_product_of_compiled_graphs_on_cpu_is_checked(name: str) -> None:
    model = meta_model(name)
    with holdfast.protect(model) as protection:
        joint, *halves = traced(model, inputs(name, "meta"), "cpu")
        listed_sites = [site for site in uncovered(protection.report()) if "/" in site]
    sites = [site_of(node) for node in joint.nodes if node.target in GEMMS]
    nodes = [node for half in halves for node in half.nodes]
    checked = {n.args[-4:] for n in nodes if str(n.target).startswith("holdfast.")}
    assert checked == set(sites)
    assert len(checked) == len(sites) > 0
    assert not any(node.target in GEMMS for node in nodes)
    assert listed_sites == []
