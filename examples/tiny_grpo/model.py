"""A decoder-only transformer of about one million parameters: pre-norm, learned positions, GELU, no bias in attention.

Two ways through the same weights: `Model.forward` reads whole sequences (training), `Model.step` reads one token per
row against a `Cache` (generation). A step always has the same shapes, whatever the position, so that the same inputs
give the same bits: that is what lets another process continue an answer exactly.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiny_grpo.settings import Settings
from tiny_grpo.task import VOCAB


class Cache:
    """The keys and values of `rows` sequences that advance together.

    `keys` and `values` are ``[layers, rows, heads, context, width / heads]``; `mask` is ``[context, context]``, row p
    the additive mask of position p. Positions not yet written are masked, and zero rather than unset: 0 * NaN is NaN.
    """

    def __init__(self, settings: Settings, rows: int) -> None:
        shape = (settings.layers, rows, settings.heads, settings.context, settings.width // settings.heads)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.mask = torch.full((settings.context, settings.context), -math.inf).triu(1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_feed = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return self._feed(x)

    def step(self, x: Tensor, position: int, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """``[rows, width]`` to the same; writes `position` of this layer's `keys` and `values`."""
        rows, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(rows, 3, self.heads, -1).unbind(1)
        keys[:, :, position] = k
        values[:, :, position] = v
        scores = torch.matmul(keys, q.unsqueeze(-1)).squeeze(-1) / math.sqrt(width // self.heads)
        weights = torch.softmax(scores + mask, dim=-1)
        mixed = torch.matmul(weights.unsqueeze(-2), values)
        x = x + self.out(mixed.reshape(rows, width))
        return self._feed(x)

    def _feed(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.down(functional.gelu(self.up(self.norm_feed(x)))))


class Model(nn.Module):
    """The policy. Its first weights are a pure function of `seed`; the process's random state is not read."""

    def __init__(self, settings: Settings, seed: int = 0) -> None:
        super().__init__()
        self.settings = settings
        self.token = nn.Embedding(VOCAB, settings.width)
        self.position = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width, settings.heads) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCAB, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    scale = 0.02 if "token" in name or "position" in name else parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, scale, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits after each token: ``[batch, time]`` of ids to ``[batch, time, vocab]``, time at most `context`."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def cache(self, rows: int) -> Cache:
        """An empty cache for `rows` sequences."""
        return Cache(self.settings, rows)

    @torch.inference_mode()
    def step(self, tokens: Tensor, position: int, cache: Cache) -> Tensor:
        """Logits after one more token per row: ``[rows]`` of ids, all at `position`, to ``[rows, vocab]``.

        Positions are fed in order from 0; `cache` then holds all that was read.
        """
        x = self.token(tokens) + self.position.weight[position]
        mask = cache.mask[position]
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):
            x = cast(Block, block).step(x, position, keys, values, mask)
        return cast(Tensor, self.head(self.norm(x)))
