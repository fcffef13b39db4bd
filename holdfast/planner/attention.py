"""One attention as six GEMMs in three protection sections: what it computes, what checks read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from holdfast.errors import ConfigError

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "S_AS": ("Q", "K", "AS"),
    "S_CL": ("V", "CL"),
    "S_O": ("O",),
}
GEMMS = tuple(gemm for gemms in SECTIONS.values() for gemm in gemms)

# Layers, width and heads of the models of ATTNChecker's Table 3, in their smallest published size.
MODELS: Mapping[str, tuple[int, int, int]] = {
    "bert-base": (12, 768, 12),
    "gpt2": (12, 768, 12),
    "gpt-neo": (12, 768, 12),
    "roberta": (12, 768, 12),
}

PUBLISHED_ATTENTION_OVERHEAD = 0.11  # ATTNChecker, section 5.3: all checks, of attention's time
PUBLISHED_STEP_OVERHEAD = 0.07  # and of the training step's


@dataclass(frozen=True)
class AttentionSize:
    """The sizes of one execution of self-attention (one layer, forward).

    Args:
        batch: sequences; length: tokens of each; width: of the model.
        heads: of the queries; kv_heads: of keys and values, 0 for as many.
        head_size: elements of one head, 0 for width / heads.

    Raises:
        ConfigError: a size is not positive, or the heads do not divide what they must.
    """

    batch: int
    length: int
    width: int
    heads: int
    kv_heads: int = 0
    head_size: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "length", "width", "heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("kv_heads", "head_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be positive, or 0: derived")
        if not self.head_size and self.width % self.heads:
            raise ConfigError(
                f"width = {self.width} is no multiple of heads = {self.heads}; give head_size"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}"
            )
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_size", self.head_size or self.width // self.heads)

    @classmethod
    def of_model(cls, model: str, batch: int, length: int) -> Self:
        """The attention of one of ``MODELS``."""
        _, width, heads = MODELS[model]
        return cls(batch, length, width, heads)

    @property
    def tokens(self) -> int:
        """Of the whole batch."""
        return self.batch * self.length

    @property
    def query_width(self) -> int:
        """Columns of Q and CL."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Columns of K and V."""
        return self.kv_heads * self.head_size

    @property
    def scores(self) -> int:
        """Elements of AS and of AP."""
        return self.batch * self.heads * self.length**2


def gemm_flops(size: AttentionSize) -> dict[str, int]:
    """Flops of each GEMM, a multiply-add counting as two: ``2 M N K``."""
    projected = 2 * size.tokens * size.width
    attended = 2 * size.scores * size.head_size
    return {
        "Q": projected * size.query_width,
        "K": projected * size.kv_width,
        "AS": attended,
        "V": projected * size.kv_width,
        "CL": attended,
        "O": projected * size.query_width,
    }


def check_reads(size: AttentionSize) -> dict[str, int]:
    """Matrix elements that checking each section reads, a matrix once for each use of it.

    Encoding reads X, Wv and AP; carrying checksums through a GEMM reads its other operand (Wq and
    Wk; K and Q; X; V and AP; Wo); the check reads AS, CL or O once, for its row and column sums
    together. S_O encodes nothing: CL's checksums are there.
    """
    x, scores = size.tokens * size.width, size.scores
    q, kv = size.tokens * size.query_width, size.tokens * size.kv_width
    w_q, w_kv = size.width * size.query_width, size.width * size.kv_width
    return {
        "S_AS": x + w_q + w_kv + kv + q + scores,
        "S_CL": w_kv + scores + x + kv + scores + q,
        "S_O": w_q + x,
    }


@dataclass(frozen=True)
class CheckCosts:
    """What the full check of each section adds to one execution of attention, all in one unit.

    Args:
        sections: by section; 0 where a check is free.
        attention: the unprotected execution; 0 where unknown.
        step: a training step's part that belongs to one execution (the step over the number of
            executions in it); 0 where unknown.

    Raises:
        ConfigError: a section is missing or unknown, or a cost is negative or not finite.
    """

    sections: Mapping[str, float]
    attention: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        if set(self.sections) != set(SECTIONS):
            raise ConfigError(f"costs of {sorted(self.sections)}: give those of {sorted(SECTIONS)}")
        for name, cost in {**self.sections, "attention": self.attention, "step": self.step}.items():
            if not 0.0 <= cost < float("inf"):
                raise ConfigError(f"cost of {name} = {cost} must be finite and at least 0")

    @property
    def total(self) -> float:
        """Of checking everything at every execution."""
        return sum(self.sections.values())


def parse_costs(document: object) -> CheckCosts:
    """Measured costs from JSON: ``{"S_AS": …, "S_CL": …, "S_O": …}``, all in seconds, and perhaps
    ``"attention"`` and ``"step"`` (see ``CheckCosts``).

    Raises:
        ConfigError: a section is missing, a name is unknown, or a value is no time.
    """
    if not isinstance(document, Mapping):
        raise ConfigError(f"costs are {document!r}: give {{section: seconds}}")
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"cost of {name} = {value!r} is no number of seconds")
    rest = {name: cost for name, cost in document.items() if name not in ("attention", "step")}
    return CheckCosts(rest, document.get("attention", 0.0), document.get("step", 0.0))


def modelled_costs(
    size: AttentionSize,
    attention_overhead: float = PUBLISHED_ATTENTION_OVERHEAD,
    step_overhead: float = PUBLISHED_STEP_OVERHEAD,
) -> CheckCosts:
    """Costs where none were measured, in executions of the unprotected attention.

    The overhead of all checks is ATTNChecker's (11 % of attention, 7 % of the training step,
    section 5.3); it is split over the sections in proportion to ``check_reads``, as checks are
    bound by memory.
    """
    reads = check_reads(size)
    unit = attention_overhead / sum(reads.values())
    sections = {name: count * unit for name, count in reads.items()}
    return CheckCosts(sections, 1.0, attention_overhead / step_overhead)
