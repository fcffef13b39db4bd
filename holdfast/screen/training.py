"""The golden training run: a short training of a small language model that must end in equal bits.

Every unit trains from equal weights on equal tokens, with all that a step has: an embedding, norms,
causal attention, GELU, the loss, all gradients, and AdamW's moments. An error of any step is in all
later ones, so that one digest of the end holds all of them.
"""

import torch
import torch.nn.functional as F

from holdfast.screen.difference import Parts
from holdfast.screen.emulation import pass_site
from holdfast.screen.job import Job, Scale, drawn

OP = "training"
STEPS, SEQUENCES, VOCABULARY, HEADS, WIDTH = 6, 4, 96, 4, 64
# Rows and columns: the embedding, queries, keys and values, the way out, both layers of the MLP.
SHAPES = ((VOCABULARY, WIDTH), (3 * WIDTH, WIDTH), (WIDTH,) * 2, (4 * WIDTH, WIDTH))
Tensor = torch.Tensor


def training_job(scale: Scale, device: torch.device) -> Job:
    """Make the workload of a training, whose result are losses, weights and gradients."""
    shapes, length = (*SHAPES, SHAPES[-1][::-1]), scale.tokens // 2

    def draw(source: torch.Generator) -> list[Tensor]:
        weights = [torch.randn(shape, generator=source) / shape[-1] ** 0.5 for shape in shapes]
        tokens = (STEPS, SEQUENCES, length + 1)
        return [torch.randint(VOCABULARY, tokens, generator=source), *weights]

    return Job(OP, trained, drawn(OP, device, draw), 1.0, "test")


def trained(tokens: Tensor, *weights: Tensor) -> Parts:
    """Train these weights on batches of tokens [steps, sequences, length + 1].

    ``gradients`` is the sum of the bits of all steps' gradients, because a weight that is larger
    than the update of a gradient's last bit keeps its own.
    """
    states = [[weight, *torch.zeros(2, *weight.shape).to(weight)] for weight in weights]
    bits = [torch.zeros_like(weight, dtype=torch.int32) for weight in weights]
    losses = []
    for batch in tokens:
        leaves = [weight.detach().requires_grad_() for weight, *_ in states]
        loss = loss_of(batch, *leaves)
        grads = torch.autograd.grad(loss, leaves)
        pass_site(OP, grads[0])
        for state, total, grad in zip(states, bits, grads, strict=True):
            total += grad.view(torch.int32)
            mean, square = state[1].lerp(grad, 0.1), state[2].lerp(grad * grad, 0.01)
            state[:] = state[0] * 0.999 - 0.001 * mean / (square.sqrt() + 1e-8), mean, square
        losses.append(loss.detach())
    ends = torch.cat([weight.flatten() for weight, *_ in states])
    seen = torch.cat([total.flatten() for total in bits])
    return {"losses": torch.stack(losses), "weights": ends, "gradients": seen}


def loss_of(
    batch: Tensor, embedding: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Compute the loss of one block of a language model whose head is its embedding."""
    x = F.embedding(batch[:, :-1], embedding)
    heads = F.linear(F.layer_norm(x, (WIDTH,)), qkv).unflatten(-1, (3, HEADS, -1))
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(-2), out)
    x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), up)), down)
    logits = F.linear(F.layer_norm(x, (WIDTH,)), embedding)
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
