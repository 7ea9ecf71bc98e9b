"""The P-EAGLE draft: EAGLE-3's network, and a learned input for the rows whose token and features do not exist yet.

A mask row reads the mask token's embedding and, in place of features, ``mask_hidden``, which passes the same norm and
``fc``. Names and shapes are those of vLLM's ``llama_eagle3.py`` and ``qwen3_eagle3.py``. In vLLM the mask token's
embedding is a row of the embedding matrix; here that row is a parameter of its own, so that the matrix stays the
verifier's, without gradient and optimiser state.

Shapes: R rows, w of them with a target, N elements, H width, A tapped layers of width H_t.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import AlgorithmSetup
from draftsmith.layers import RotaryTable
from draftsmith_eagle3.model import DraftLayer, Eagle3Network
from draftsmith_peagle.batch import Batch
from draftsmith_peagle.mask import Attend
from draftsmith_peagle.options import PEagleOptions, mask_token

__all__ = ["PEagleDraft"]


class PEagleDraft(Eagle3Network):
    """The draft network. Beside EAGLE-3's modules:

    Attributes:
        mask_hidden: [1, 1, A * H_t], what mask rows have in place of features.
        mask_embedding: [1, H], the mask token's embedding; None: the verifier's.
        mask_token_id: the mask token.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        options: PEagleOptions = setup.options
        self.mask_token_id = mask_token(options, setup.verifier)
        # As large as features that pass a norm: without one their scale is the verifier's, which fc learns.
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.num_taps * setup.verifier.hidden_size))
        self.mask_embedding: nn.Parameter | None = None
        if options.train_mask_embedding:
            # Not the verifier's row: that of a token that never occurs may be anything, zeros too.
            fresh = torch.empty(1, self.config.hidden_size).normal_(0.0, options.initializer_range)
            self.mask_embedding = nn.Parameter(fresh)

    def mask_row(self) -> Tensor:
        """[1, H], the mask token's embedding."""
        if self.mask_embedding is not None:
            return self.mask_embedding
        return self.embed_tokens.weight[self.mask_token_id][None]

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """Normed hidden states [w + N, H] of the batch's slots; times the head they are logits."""
        if not batch.starts.numel():  # nothing to predict, still a function of the weights
            nothing: Tensor = self.norm(self.fuse(batch.taps[:0]))
            return nothing
        run = _ForwardPass(self, batch, attend)
        embedded = F.embedding(batch.token_ids, self.embed_tokens.weight)
        embedded = torch.cat([each.to(self.compute_dtype) for each in (embedded, self.mask_row())])
        # All mask rows are alike before attention: one, the last, stands for them.
        hidden = torch.cat((self.fuse(batch.taps), self.fuse(self.mask_hidden[0])))
        for index in range(len(self.layers)):
            hidden = run.layer(index, hidden, embedded)
        normed: Tensor = self.norm(hidden)
        return normed


class _ForwardPass:
    """One packed row's run through the layers: its rows first, then its elements."""

    def __init__(self, model: PEagleDraft, batch: Batch, attend: Attend) -> None:
        self.model = model
        self.batch = batch
        self.attend = attend
        self.rows = batch.token_ids.shape[0]
        self.elements = batch.anchor.shape[0]
        positions = torch.cat((batch.positions, batch.positions[batch.anchor] + batch.depth))
        self.table: RotaryTable = model.rotary(positions)

    def layer(self, index: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        """One layer, on [R + 1, H] (the first one) or [R + N, H] → [R + N, H], or [w + N, H] (the last one)."""
        model, batch = self.model, self.batch
        layer = model.layers[index]
        assert isinstance(layer, DraftLayer)
        weights, mlp = layer.self_attn.fused(model.compute_dtype), layer.mlp.fused(model.compute_dtype)
        if index:
            residual, inputs = hidden, layer.input_layernorm(hidden)
        else:
            normed = layer.hidden_norm(hidden)
            residual = normed if model.options.norm_before_residual else hidden
            inputs = torch.cat((layer.input_layernorm(embedded), normed), dim=-1)
        # Every row leaves keys and values; after the last layer only rows with a target are read.
        wanted = batch.starts if index == len(model.layers) - 1 and batch.starts.shape[0] < self.rows else None
        size = model.config.query_size
        if wanted is None:
            projected = self._spread(index, F.linear(inputs, weights.qkv))
            queries, others, table = projected[:, :size], projected[:, size:], self.table
        else:
            others = self._spread(index, F.linear(inputs, weights.qkv[size:]))
            queries = self._spread(index, F.linear(self._chosen(inputs, wanted), weights.qkv[:size]))
            table = RotaryTable(*(self._chosen(each, wanted) for each in self.table))
            residual = self._chosen(residual, wanted)
        query = layer.self_attn.query(queries, weights, table)
        key, value = layer.self_attn.key_value(others, weights, self.table)
        attended = self._attended(query, key, value, wanted)
        hidden = self._spread(index, residual) + F.linear(attended, weights.o)
        return hidden + layer.mlp.apply_fused(layer.post_attention_layernorm(hidden), mlp)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, wanted: Tensor | None) -> Tensor:
        """[w + N or R + N, h · d], of the rows *wanted* (None: all) and the elements."""
        count = query.shape[0] - self.elements
        row_query = query[:count]
        if wanted is not None:  # nobody reads the other rows
            row_query = query.new_zeros(self.rows, *query.shape[1:]).index_copy(0, wanted, row_query)
        rows, elements = self.attend(
            row_query,
            key[: self.rows],
            value[: self.rows],
            query[count:],
            key[self.rows :],
            value[self.rows :],
            self.batch.chains,
        )
        rows = rows if wanted is None else rows.index_select(0, wanted)
        return torch.cat((rows, elements)).flatten(1)

    def _chosen(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The rows *wanted* of [R + …, …], and what comes after all rows."""
        return torch.cat((x[: self.rows].index_select(0, wanted), x[self.rows :]))

    def _spread(self, index: int, x: Tensor) -> Tensor:
        """[… + 1, …] of the first layer → [… + N, …]; of later ones, where every element has its own row, as it is."""
        if index:
            return x
        return torch.cat((x[:-1], x[-1:].expand(self.elements, *x.shape[1:])))
