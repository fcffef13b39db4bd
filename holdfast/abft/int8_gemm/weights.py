"""An int8 weight, packed once with its checksums, which can be verified and repaired."""

import threading
from collections.abc import Callable

import torch

from holdfast import native
from holdfast.abft.int8_gemm.encoding import (
    ENCODINGS,
    PADDING,
    check_extents,
    column_sums,
    from_digits,
    largest_accumulator,
    modular_column,
    row_sums,
    signed_digits,
)
from holdfast.abft.int8_gemm.operands import (
    Twice,
    as_call,
    check_bias,
    check_call,
    check_scale,
    check_weight,
    check_zero_point,
    padded,
)
from holdfast.abft.int8_gemm.reference import ReferenceInt8Gemm, Scales
from holdfast.abft.int8_gemm.weight_repair import Healed, Mended, mend, parts_of
from holdfast.abft.registry import Implementation, Operator, needs_triton
from holdfast.abft.source import Source
from holdfast.digest.tensors import tensor_digest, tensors_digest
from holdfast.errors import ConfigError

__all__ = ["Healed", "Int8Weights", "Mended"]


class Int8Weights:
    """The weight of a quantised linear layer, ready to multiply.

    ``y = (A − za)(W − zw)ᵀ · a_scale · scale + bias``

    Args:
        weight: W, int8 [N, K] as in ``nn.Linear``; K ≤ 65,793, or 33,025 with zero points, and
            N ≤ 65,536.
        scale: Scale of W, fp32, one element or N; finite and positive.
        zero_point: Zero point of W, integers from −128 to 127, one or N; 0 by default.
        bias: fp32 [N], finite.
        relu: Clamps the output at 0.
        encoding: ``digits``, which is exact and can correct, or ``mod127`` of the DLRM paper.
        implementation: ``native`` (FBGEMM, on CPU), ``triton`` (on CUDA) or ``reference`` (plain
            torch); by default the first that serves the weight's device.

    Set ``source`` to a function that returns the weights of an output by its number, int8 [K] or
    floats, if there is one: it restores what checksums cannot repair.

    Guarantees: see ``int8_linear``. Beside the packed weight, ``digits`` takes one byte per input
    and digit (two or three digits for the sums, up to five for the weighted sums, one for zero
    points) and 16 bytes per output; ``mod127`` takes the packed check column.

    Threads: any number may multiply at once. Repairs are serialised; a product that reads a partly
    repaired weight contradicts its check and is computed again.

    Raises:
        ConfigError: An extent is larger than int32 accumulators or the checksums can hold, or the
            implementation is unavailable.
        ValueError, TypeError: A tensor does not fit; says what would.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | float,
        zero_point: torch.Tensor | int = 0,
        *,
        bias: torch.Tensor | None = None,
        relu: bool = False,
        encoding: str = "digits",
        implementation: str | None = None,
    ) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding = {encoding!r}: give one of {', '.join(ENCODINGS)}")
        check_weight(weight)
        self.columns, self.inner = weight.shape
        self.encoding, self.relu, self.device = encoding, bool(relu), weight.device
        self._implementation = INT8_GEMM.select(weight.device.type, name=implementation)
        with torch.inference_mode(False):  # else nothing could ever be written to it again
            self.zero_point = check_zero_point(zero_point, self.columns, self.device)
            check_extents(self.inner, self.columns, shifted=self.zero_point is not None)
            self._scale = Twice(check_scale(scale, self.columns, self.device), self.columns)
            self.scale = self._scale.given
            self.bias = check_bias(bias, self.columns, self.device)
            self.source: Source | None = None
            self._pack(weight.detach().T.contiguous())

    def _pack(self, b: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self.history = (0, 0)  # number of repairs of weights, and of checks
        zero, bias = self.zero_point, self.bias
        self._zero = None if zero is None else Twice(zero, self.columns)
        self._bias = Twice(torch.zeros_like(self.scale[:1]) if bias is None else bias, self.columns)
        sums, weighted = row_sums(b)
        self.of_columns = column_sums(b)
        self._column_sums = padded(self.of_columns[0].int())
        if self.encoding == "digits":
            self.checks, self.weighted = signed_digits(sums), signed_digits(weighted)
        else:
            self.checks = self.weighted = b.new_zeros((0, self.inner))
            self.of_columns = self.of_columns[:, :0]
        self._digits = self._padded_digits(self.checks)
        self.checks = self._digits[:, : self.inner]
        self._ones = b.new_ones((1, self._digits.shape[1]))
        self.gemm = self._make(b)
        self.native = not isinstance(self.gemm, ReferenceInt8Gemm)
        self.deferred: bool = getattr(self.gemm, "deferred", False)
        self._digests = self._digest()
        self._last: tuple[tuple[float, int, float, int], Scales] | None = None

    def _padded_digits(self, digits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(digits, (0, PADDING + -self.inner % PADDING))

    def _make(self, b: torch.Tensor) -> ReferenceInt8Gemm:
        modular = self.encoding == "mod127"
        return self._implementation(
            torch.cat([b, modular_column(row_sums(b)[0])], 1) if modular else b,
            self.columns,
            modular,
            self._digits,
            self._ones,
            self._column_sums,
            self._scale.padded,
            None if self._zero is None else self._zero.padded,
            self._bias.padded,
            self.relu,
        )

    def _digest(self) -> tuple[str, str, str]:
        checks = tensors_digest([self._digits, self.weighted, self.of_columns])
        return (
            tensor_digest(self.gemm.buffer),
            checks,
            tensors_digest([self._ones, self._column_sums]),
        )

    def scales(
        self,
        a_scale: float | torch.Tensor,
        a_zero_point: int | torch.Tensor,
        out_scale: float,
        out_zero_point: int,
    ) -> Scales:
        """Compute the scales of a call, or return those of the latest call if they are the same.

        If A's scale and zero point are tensors on the device, nothing is checked or kept.

        Raises:
            ValueError: A scale is not finite and positive or makes fp32 overflow, or a zero point
                is not from 0 to 255.
        """
        given = isinstance(a_scale, torch.Tensor) or isinstance(a_zero_point, torch.Tensor)
        if given and self.deferred:
            return self.gemm.scales(a_scale, a_zero_point, out_scale, out_zero_point)
        last = self._last
        if last is not None and last[0] == (a_scale, a_zero_point, out_scale, out_zero_point):
            return last[1]
        key = as_call(a_scale, a_zero_point, out_scale, out_zero_point)  # type: ignore[arg-type]
        accumulator = largest_accumulator(self.inner, shifted=self.zero_point is not None)
        check_call(*key, weight_scale=float(self.scale.max()), accumulator=accumulator)
        made = self.gemm.scales(*key)
        if key[2] and not bool(made.scale.isfinite().all() and made.addend.isfinite().all()):
            raise ValueError(
                f"out_scale = {out_scale} is too small: a_scale · scale / out_scale or bias / "
                "out_scale overflows fp32; calibrate the output"
            )
        self._last = key, made
        return made

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the tensors in which the weight and its checksums are stored, by their names."""
        given = {"scale": self.scale, "zero_point": self.zero_point, "bias": self.bias}
        checks = {"weighted_checks": self.weighted, "column_sums": self.of_columns}
        present = {name: tensor for name, tensor in given.items() if tensor is not None}
        return {"packed": self.gemm.buffer, "checks": self._digits, **checks, **present}

    def matrix(self) -> torch.Tensor:
        """Copy B = Wᵀ as it is in memory now, int8 [K, N]."""
        return self.gemm.unpack()[:, : self.columns]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row sums S and the weighted ones W, int64 [K] each, from their digits."""
        return from_digits(self.checks), from_digits(self.weighted)

    def intact(self) -> bool:
        """Return whether the packed weight, its checksums and its scaling are as they were packed.

        The scaling is scale, zero point and bias, ``Σ_k B[k, j]``, and the scales of the latest
        call.
        """
        if self._digest() != self._digests or not all(each.intact() for each in self.twice()):
            return False
        if self._last is None:
            return True
        call, made = self._last
        return all(
            torch.equal(now.view(torch.int32), then.view(torch.int32))
            for now, then in zip(parts_of(made), parts_of(self.gemm.scales(*call)), strict=True)
        )

    def twice(self) -> list[Twice]:
        """Return scale, zero point and bias, each stored twice."""
        return [each for each in (self._scale, self._zero, self._bias) if each is not None]

    def heal(self) -> list[Healed] | None:
        """Repair what changed; return the weights among it, or None if repair is not possible.

        A changed weight is located if it is the only one of its input or of its output, or becomes
        so as others are repaired; the outputs of weights that are not are taken from ``source``, if
        there is one. Damaged checksums are computed again from an intact weight; scale, zero point
        and bias are restored from their second copy. If the result does not have the fingerprint
        that was taken at packing, nothing is changed.
        """
        mended = self.mend()
        return None if mended is None else mended.weights

    def mend(self, column: int | None = None) -> Mended | None:
        """Repair as ``heal`` does, and return the repaired parts (see ``weight_repair.mend``)."""
        return mend(self, column)

    def quantised(self, floats: torch.Tensor, output: int) -> torch.Tensor:
        """Quantise one output's weights [K] by its scale and zero point, int8 [K]."""
        scale, zero = (
            0 if each is None else each.expand(self.columns)[output].cpu()
            for each in (self.scale, self.zero_point)
        )
        return ((floats.float() / scale).round() + zero).clamp(-128, 127).to(torch.int8)

    def weight(self) -> torch.Tensor:
        """Copy W, int8 [N, K].

        Raises:
            ConfigError: It is damaged beyond repair.
        """
        if not self.intact() and self.heal() is None:
            raise ConfigError(
                "the packed weight is damaged beyond healing: register a source, or load it again"
            )
        return self.matrix().T.contiguous()

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.weight(), self.scale, self.zero_point, self.bias, self.relu, self.encoding)
        return _restored, state


def _restored(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    bias: torch.Tensor | None,
    relu: bool,
    encoding: str,
) -> Int8Weights:
    zero = 0 if zero_point is None else zero_point
    return Int8Weights(weight, scale, zero, bias=bias, relu=relu, encoding=encoding)


def _needs_fbgemm() -> str:
    if native.core is None:
        return native.MISSING
    return "" if native.core.int8_available() else "this processor has no FBGEMM kernels"


def _triton() -> type[ReferenceInt8Gemm]:
    from holdfast.abft.int8_gemm.cuda import TritonInt8Gemm

    return TritonInt8Gemm


# The native class has the interface of the reference.
INT8_GEMM: Operator[Callable[..., ReferenceInt8Gemm]] = Operator(
    "int8_gemm",
    [
        Implementation("native", lambda: native.required().Int8Gemm, missing=_needs_fbgemm),
        Implementation("triton", _triton, ("cuda",), missing=needs_triton),
        Implementation("reference", lambda: ReferenceInt8Gemm, ("cpu", "cuda")),
    ],
)
