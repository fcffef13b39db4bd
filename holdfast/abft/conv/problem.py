"""A convolution with its arguments, and what it computes as maps that are linear in images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_Results = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Convolution(NamedTuple):
    """The arguments of ``aten::convolution``, in its order."""

    images: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def forward(
        self, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Convolve other images by another weight, with the same geometry."""
        result: torch.Tensor = torch.ops.aten.convolution.default(images, weight, bias, *self[3:])
        return result

    def backward(
        self, gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor, mask: list[bool]
    ) -> _Results:
        """Compute those gradients of the images, the weight and the bias that ``mask`` asks for."""
        channels = [gradient.shape[1]]
        results: _Results = torch.ops.aten.convolution_backward.default(
            gradient, images, weight, channels, *self[3:], mask
        )
        return results

    def grad_images(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of as many images as ``gradient`` has, of any number of channels."""
        channels = weight.shape[0] if self.transposed else weight.shape[1] * self.groups
        like = gradient.new_empty(gradient.shape[0], channels, *self.images.shape[2:])
        return self._only(0, gradient, like, weight)

    def grad_weight(self, gradient: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the weight."""
        return self._only(1, gradient, images, self.weight.detach().to(gradient.dtype))

    def _only(
        self, index: int, gradient: torch.Tensor, images: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        mask = [each == index for each in range(3)]
        result = self.backward(gradient, images, weight, mask)[index]
        assert result is not None
        return result


@dataclass(frozen=True)
class ImageMap:
    """The forward pass or the gradient of the images: y_n = L(x_n, w) + bias for each image n.

    ``inner`` is the number of products of an element of y, and ``outer`` the dimension of the
    weight along which its output channels lie; groups lie along 0.
    """

    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    images: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    inner: int
    outer: int
    groups: int


def image_map(convolution: Convolution, gradient: torch.Tensor | None = None) -> ImageMap:
    """Return the forward pass, or the map from the output's gradient to that of the images."""
    weight, groups = convolution.weight, convolution.groups
    outer = int(convolution.transposed == (gradient is None))
    inner = weight.shape[1 - outer] // (groups if outer else 1) * math.prod(weight.shape[2:])
    if gradient is None:
        images, _, bias = convolution[:3]
        return ImageMap(convolution.forward, images, weight, bias, inner, outer, groups)
    return ImageMap(convolution.grad_images, gradient, weight, None, inner, outer, groups)
