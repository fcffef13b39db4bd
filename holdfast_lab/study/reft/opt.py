"""The training states of OPT models, with shapes from their published configurations."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from holdfast.snapshot.layout import flat_buffer
from holdfast.snapshot.layout.flat_buffer import Flat
from holdfast.snapshot.parity.stripes import Span

Shape = tuple[int, ...]
ADAM = ("parameter", "exp_avg", "exp_avg_sq")
VOCABULARY, POSITIONS = 50_272, 2_050
FP32_BYTES = 4


@dataclass(frozen=True)
class Opt:
    """A configuration of OPT.

    Attributes:
        layers, width: Number of decoder layers and their width; the feed-forward part is four times
            as wide.
        embedding: Width of the token embedding, which the head shares. If it differs from
            ``width``, a projection leads from it to ``width`` and back, and there is no last norm.
    """

    name: str
    layers: int
    width: int
    embedding: int

    def stages(self, count: int) -> list[list[Shape]]:
        """Return the shapes of all parameters, with layers divided evenly among pipeline stages.

        Embeddings are in the first stage, the last norm is in the last. The head shares the
        embedding, which is not stored again.
        """
        dealt = [self.layers * stage // count for stage in range(count + 1)]
        found = [
            [shape for _ in range(last - first) for shape in self._layer()]
            for first, last in pairwise(dealt)
        ]
        w, e = self.width, self.embedding
        found[0] = [(VOCABULARY, e), (POSITIONS, w), *([(w, e)] if e != w else []), *found[0]]
        found[-1] += [(e, w)] if e != w else [(w,), (w,)]
        return found

    def _layer(self) -> Iterator[Shape]:
        w = self.width
        for rows, columns in ((w, w),) * 4 + ((4 * w, w), (w, 4 * w)):
            yield rows, columns
            yield (rows,)
        yield from ((w,),) * 4

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(torch.Size(shape).numel() for shape in self.stages(1)[0])

    @property
    def state_bytes(self) -> int:
        """Number of bytes of the parameters and Adam's two moments, in fp32."""
        return len(ADAM) * FP32_BYTES * self.parameters


TINY = Opt("a layer of OPT-125M's, narrow", 1, 64, 64)
OPT_125M = Opt("OPT-125M", 12, 768, 768)
OPT_350M = Opt("OPT-350M", 24, 1024, 512)


def training_state(shapes: list[Shape], generator: torch.Generator) -> Flat:
    """Draw random fp32 parameters of these shapes and their Adam moments."""
    named = {
        f"{number}.{part}": torch.empty(shape).uniform_(generator=generator)
        for number, shape in enumerate(shapes)
        for part in ADAM
    }
    return flat_buffer.flatten(named)


def cut(flat: Flat, span: Span) -> Flat:
    """Return the tensors, or parts of them, in a span of bytes that divides no element."""
    found, start = {}, 0
    for path, tensor in zip(flat.paths, flat.tensors, strict=True):
        size, flattened = tensor.element_size(), tensor.reshape(-1)
        first, last = (max(0, at - start) // size for at in (span.start, span.stop))
        if first < min(last, len(flattened)):
            found[path] = flattened[first:last]
        start += len(flattened) * size
    return flat_buffer.flatten(found)
