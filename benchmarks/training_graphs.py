"""Forward, loss and backward of single-device models as one graph, traced on fake tensors and decomposed as Inductor
does before it simplifies: the graphs that torch's own pass is made for.

`gpt(layers)`: layer norms, biases, GELU and written-out attention. `llama(layers)`: RMS norms, rotary positions,
grouped heads, SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from crossfade.graph.private import FakeTensorMode

WIDTH, HEADS, GROUPS, LENGTH, HIDDEN, VOCABULARY, BATCH = 256, 8, 4, 128, 1024, 512, 2
HEAD = WIDTH // HEADS

Block = Callable[[Tensor, list[Tensor]], Tensor]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.transpose(-1, -2) * HEAD**-0.5
    mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
    return mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(BATCH, LENGTH, count, HEAD).transpose(1, 2)


def _mask() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def _gpt_block(x: Tensor, parameters: list[Tensor]) -> Tensor:
    scale, shift, qkv, qkv_bias, out, out_bias, scale_2, shift_2, up, up_bias, down, down_bias = parameters
    h = F.linear(F.layer_norm(x, (WIDTH,), scale, shift), qkv, qkv_bias)
    query, key, value = (_heads(part, HEADS) for part in h.split(WIDTH, dim=-1))
    x = x + F.linear(_attend(query, key, value, _mask()), out, out_bias)
    h = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), scale_2, shift_2), up, up_bias))
    return x + F.linear(h, down, down_bias)


_GPT = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
_GPT += [(WIDTH,), (WIDTH,), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    wide = x.float()
    return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _turned(x: Tensor) -> Tensor:
    """Rotary positions, as models write them: halves cut, negated and put together again."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(LENGTH).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def _repeated(x: Tensor) -> Tensor:
    times = HEADS // GROUPS
    return x[:, :, None].expand(BATCH, GROUPS, times, LENGTH, HEAD).reshape(BATCH, HEADS, LENGTH, HEAD)


def _llama_block(x: Tensor, parameters: list[Tensor]) -> Tensor:
    norm, q, k, v, out, norm_2, gate, up, down = parameters
    h = _norm(x, norm)
    query, key, value = _heads(F.linear(h, q), HEADS), _heads(F.linear(h, k), GROUPS), _heads(F.linear(h, v), GROUPS)
    mixed = _attend(_turned(query), _repeated(_turned(key)), _repeated(value), _mask())
    x = x + F.linear(mixed, out)
    h = _norm(x, norm_2)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


_LLAMA = [(WIDTH,), (WIDTH, WIDTH), (GROUPS * HEAD, WIDTH), (GROUPS * HEAD, WIDTH), (WIDTH, WIDTH)]
_LLAMA += [(WIDTH,), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)]


def _trace(block: Block, shapes: list[tuple[int, ...]], layers: int) -> fx.GraphModule:
    def step(tokens: Tensor, targets: Tensor, table: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        leaves = [weight.detach().requires_grad_() for weight in (table, *parameters)]
        x = F.embedding(tokens, leaves[0])
        for layer in range(layers):
            start = 1 + layer * len(shapes)
            x = block(x, leaves[start : start + len(shapes)])
        loss = F.cross_entropy(F.linear(x, leaves[0]).flatten(0, 1), targets.flatten())
        return [loss, *torch.autograd.grad(loss, leaves)]

    from torch._inductor.decomposition import select_decomp_table

    with FakeTensorMode():
        table = torch.empty(VOCABULARY, WIDTH)
        parameters = [torch.empty(shape) for _ in range(layers) for shape in shapes]
        tokens, targets = (torch.zeros(BATCH, LENGTH, dtype=torch.int64) for _ in range(2))
        module = make_fx(step, select_decomp_table())(tokens, targets, table, parameters)
    module.graph.eliminate_dead_code()
    return module


def gpt(layers: int) -> fx.GraphModule:
    """A GPT."""
    return _trace(_gpt_block, _GPT, layers)


def llama(layers: int) -> fx.GraphModule:
    """A Llama."""
    return _trace(_llama_block, _LLAMA, layers)
