"""The overhead of checked attention in large data-parallel training, from sizes and speeds alone.

This is a model, not a measurement. Its assumptions are ``Decoder``, ``Cluster`` and the two ways to
compute the time of the checks.
"""

from dataclasses import dataclass

from holdfast.errors import ConfigError
from holdfast.planner.attention import (
    PUBLISHED_ATTENTION_OVERHEAD,
    AttentionSize,
    check_reads,
    gemm_flops,
)

PRICES = ("reads", "share")
_BACKWARD_TO_FORWARD = 2  # backward computes a gradient of each operand


@dataclass(frozen=True)
class Decoder:
    """A GPT of blocks of attention (4 d² weights) and feed-forward (8 d²), without embeddings."""

    name: str
    layers: int
    width: int
    heads: int

    @property
    def parameters(self) -> int:
        """Number of parameters of all blocks."""
        return 12 * self.layers * self.width**2


@dataclass(frozen=True)
class Cluster:
    """Devices that train one model by data parallelism.

    Optimizer state is assumed to be sharded, so that every model fits. Its time, and that of
    everything that is no GEMM, is left out. Gradients are reduced in a ring, during the backward
    pass as far as ``overlap`` allows.

    Attributes:
        flops: Floating-point operations per second of a device.
        utilisation: Share of them that GEMMs reach.
        check_efficiency: Share of the memory's speed that checks reach.
        link_bytes_s: Speed from each device to its neighbour.
        overlap: Share of the backward pass during which gradients can be sent.
        batch, length: Number of sequences on a device, and of tokens in each.
        element_bytes: Size of an element of activations, weights and gradients.

    Raises:
        ConfigError: A speed or size is not positive, or a share is not in [0, 1].
    """

    devices: int = 1024
    flops: float = 312e12
    utilisation: float = 0.5
    memory_bytes_s: float = 2.0e12
    check_efficiency: float = 0.8
    link_bytes_s: float = 25e9
    overlap: float = 1.0
    batch: int = 4
    length: int = 2048
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name != "overlap" and not value > 0:
                raise ConfigError(f"{name} = {value} must be positive")
            if name in ("overlap", "utilisation", "check_efficiency") and not 0 <= value <= 1:
                raise ConfigError(f"{name} = {value} must be at most 1 and not negative")


@dataclass(frozen=True)
class ScaledOverhead:
    """Seconds of one training step on each device, and the seconds that checks add."""

    compute_s: float
    all_reduce_s: float
    step_s: float
    checks_s: float

    @property
    def overhead(self) -> float:
        """Overhead as a share of the step."""
        return self.checks_s / self.step_s


def scaled_overhead(decoder: Decoder, cluster: Cluster, price: str = "reads") -> ScaledOverhead:
    """Model a training step in which every layer's attention is checked, in the forward pass only.

    With the price ``"reads"`` checks take the time of reading their matrices (``check_reads``).
    With ``"share"`` they take 11 % of the attention's time, as ATTNChecker measured for BERT.

    Raises:
        ConfigError: The price is unknown, or the model's width is no multiple of its heads.
    """
    if price not in PRICES:
        raise ConfigError(f"price = {price!r}: choose {' or '.join(PRICES)}")
    size = AttentionSize(cluster.batch, cluster.length, decoder.width, decoder.heads)
    attention = sum(gemm_flops(size).values())
    feed_forward = 2 * size.tokens * 8 * decoder.width**2
    forward_s = decoder.layers * (attention + feed_forward) / (cluster.flops * cluster.utilisation)
    backward_s = _BACKWARD_TO_FORWARD * forward_s
    all_reduce_s = _ring_s(decoder.parameters * cluster.element_bytes, cluster)
    waiting_s = max(0.0, all_reduce_s - cluster.overlap * backward_s)
    if price == "reads":
        read = sum(check_reads(size).values()) * cluster.element_bytes
        check_s = read / (cluster.memory_bytes_s * cluster.check_efficiency)
    else:
        attention_s = attention / (cluster.flops * cluster.utilisation)
        check_s = PUBLISHED_ATTENTION_OVERHEAD * attention_s
    compute_s = forward_s + backward_s
    return ScaledOverhead(compute_s, all_reduce_s, compute_s + waiting_s, decoder.layers * check_s)


def _ring_s(count_bytes: float, cluster: Cluster) -> float:
    """Return the time of a ring all-reduce, in which a device sends 2 (n − 1) / n of the bytes."""
    return 2 * (cluster.devices - 1) / cluster.devices * count_bytes / cluster.link_bytes_s
