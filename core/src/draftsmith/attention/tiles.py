"""Attention in tiles: some queries on a slice of the keys, of which a mask shows each what it sees.

What the memory-linear forms share whose queries hang on rows: they see a row's context, up to different ends. Tiles
are made one after the other, so that no more than one mask exists at a time.

Shapes: Q queries, T keys, h query heads, g key/value heads (g divides h), d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.attention.kernels import by_key_head, kernel_backward, kernel_forward, kernel_keys, kernel_view

__all__ = ["TILE_ROWS", "Tile", "additive", "device_kind", "tiles_backward", "tiles_forward"]

#: Query rows of a tile. Larger tiles hide more, smaller ones are more calls.
TILE_ROWS = {"cpu": 320, "accelerator": 1024}


class Tile(NamedTuple):
    """One kernel call: the rows *queries* of the queries on the rows *keys* of the keys; see :func:`additive`."""

    queries: slice
    keys: slice
    mask: Tensor


def device_kind(like: Tensor) -> str:
    """Key of the sizes that depend on where *like* is: ``cpu`` or ``accelerator``."""
    return "cpu" if like.device.type == "cpu" else "accelerator"


def additive(hidden: Tensor, like: Tensor) -> Tensor:
    """The mask of a tile, in the dtype of *like*: 0, and where *hidden* is True so low that nothing is left of it.

    Not -inf: a query that sees nothing here still has a finite log-sum-exp, which what it sees elsewhere outweighs.
    """
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, torch.finfo(like.dtype).min / 2)


def tiles_forward(query: Tensor, key: Tensor, value: Tensor, tiles: Iterable[Tile]) -> tuple[Tensor, Tensor]:
    """Output [Q, g, h/g, d] in float32 or wider, and log-sum-exp [Q, g, h/g]: -inf for queries of no tile."""
    kv_heads = key.shape[1]
    grouped = by_key_head(query, kv_heads)
    wide = torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros(grouped.shape, dtype=wide, device=query.device)
    lse = torch.full(grouped.shape[:3], float("-inf"), dtype=wide, device=query.device)
    for queries, keys, mask in tiles:
        out, log_sum = kernel_forward(
            kernel_view(query[queries], kv_heads), kernel_keys(key[keys]), kernel_keys(value[keys]), mask
        )
        output[queries] = out.permute(2, 0, 1, 3)
        lse[queries] = log_sum.permute(2, 0, 1)
    return output, lse


def tiles_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    tiles: Iterable[Tile],
    grad_query: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values; the queries' is added to *grad_query*.

    Args:
        output, lse: of the whole softmax, of which the tiles are a part.
    """
    kv_heads = key.shape[1]
    grad_by_head = by_key_head(grad_query, kv_heads)
    # Several tiles add to the same rows: in float32, as one sum would be.
    grad_key, grad_value = (torch.zeros(key.shape, dtype=lse.dtype, device=key.device) for _ in range(2))
    for queries, keys, mask in tiles:
        part, part_key, part_value = kernel_backward(
            kernel_view(grad[queries], kv_heads),
            kernel_view(query[queries], kv_heads),
            kernel_keys(key[keys]),
            kernel_keys(value[keys]),
            kernel_view(output[queries], kv_heads),
            lse[queries].permute(1, 2, 0),
            mask,
        )
        grad_by_head[queries] += part.permute(2, 0, 1, 3)
        grad_key[keys] += part_key.transpose(0, 1)
        grad_value[keys] += part_value.transpose(0, 1)
    return grad_key.to(key.dtype), grad_value.to(value.dtype)
