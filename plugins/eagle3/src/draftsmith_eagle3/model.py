"""The EAGLE-3 draft: (token embedding, fused verifier features) → decoder layers → the verifier's head.

Source: EAGLE-3 (arXiv 2503.01840); names, shapes and flags are those of vLLM's ``llama_eagle3.py`` and
``qwen3_eagle3.py``, which serve it. :meth:`Eagle3Draft.forward` is training-time test: the chains of all rows of a
packed row, step by step.

Shapes: R rows, n chains alive, H width, A tapped layers of width H_t, V_t and V_d target and draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture
from draftsmith.layer_config import LayerConfig
from draftsmith.layers import (
    Attention,
    AttentionWeights,
    Mlp,
    MlpWeights,
    RMSNorm,
    RotaryEmbedding,
    RotaryTable,
    Weight,
    draft_head,
    initialise,
)
from draftsmith_eagle3.batch import Batch
from draftsmith_eagle3.mask import Attend
from draftsmith_eagle3.options import NetworkOptions, layer_config

__all__ = ["DraftLayer", "Eagle3Draft", "Eagle3Network"]


class DraftLayer(nn.Module):
    """A decoder layer. The first one attends from [embedding, hidden], twice the width."""

    def __init__(self, config: LayerConfig, *, is_first: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = RMSNorm(width, config.rms_norm_eps)
        if is_first:
            self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * width if is_first else width)
        self.post_attention_layernorm = RMSNorm(width, config.rms_norm_eps)
        self.mlp = Mlp(config)


class Eagle3Network(nn.Module, DraftArchitecture):
    """The network, with the verifier's embedding and (restricted) head in place and frozen.

    ``setup.options`` is a :class:`NetworkOptions`. A subclass says how it is trained: it has the ``forward``, and may
    build further parameters after ``super().__init__(setup)``, which it initialises itself.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__()
        options: NetworkOptions = setup.options
        self.options = options
        self.config = layer_config(options, setup.verifier)
        self.compute_dtype = setup.compute_dtype
        self.num_taps = len(setup.capture.layer_ids)
        target_width = setup.verifier.hidden_size
        eps = self.config.rms_norm_eps
        self.embed_tokens = Weight(setup.weights.embed_tokens.detach())
        self.input_norm = RMSNorm(self.num_taps * target_width, eps) if options.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(target_width, eps) for _ in range(self.num_taps)) if options.fc_norm else None
        )
        self.fc = nn.Linear(self.num_taps * target_width, self.config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            DraftLayer(self.config, is_first=index == 0) for index in range(self.config.num_layers)
        )
        self.norm = RMSNorm(self.config.hidden_size, eps)
        self.lm_head = Weight(draft_head(setup.weights, setup.vocabulary, setup.compute_dtype))
        self.rotary = RotaryEmbedding(self.config)
        initialise(self, options.initializer_range)

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """The verifier's embedding, and the rows of its head that the draft can propose."""
        return {"embed_tokens.weight": self.embed_tokens.weight, "lm_head.weight": self.lm_head.weight}

    def vocabulary_tensors(self) -> Collection[str]:
        return {"embed_tokens.weight", "lm_head.weight"}

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [R, A * H_t] → hidden [R, H]."""
        features = taps.to(self.compute_dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(self.num_taps, dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return F.linear(features, self.fc.weight.to(self.compute_dtype))


class Eagle3Draft(Eagle3Network):
    """The draft, trained step by step on its own continuations."""

    def forward(self, batch: Batch, attend: Attend) -> list[Tensor]:
        """Normed hidden states [n_k, H] of the chains alive at each step that has any; times the head they are logits.

        The embedding's share of the first layer's projection depends on the token alone, so it is computed once per
        token and shared by all steps that read it.
        """
        if not batch.steps[0].rows.numel():  # no chain: nothing to predict, still a function of the weights
            return [self.norm(self.fuse(batch.taps[:0]))]
        run = _ForwardPass(self, batch, attend)
        hidden = self.fuse(batch.taps)
        outputs: list[Tensor] = []
        for step, alive in enumerate(batch.steps):
            if not alive.rows.numel():
                break
            if step:
                hidden = _chosen(hidden, alive.kept)
            raw = run.step(step, hidden)
            normed = self.norm(raw)
            outputs.append(normed)
            # At step k >= 1 the verifier's features do not exist yet: the draft's own state stands in, at the row.
            hidden = normed if self.options.norm_output else raw
        return outputs


def _chosen(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]. The backward of index_select adds whole rows; that of indexing adds elements, serially on CPUs."""
    return x.index_select(0, rows)


class _LayerWeights(NamedTuple):
    attention: AttentionWeights
    mlp: MlpWeights


class _ForwardPass:
    """One packed row's run through the layers: fused weights, and the keys and values of all steps so far."""

    def __init__(self, model: Eagle3Draft, batch: Batch, attend: Attend) -> None:
        self.model = model
        self.batch = batch
        self.attend = attend
        self.layers: list[DraftLayer] = list(model.layers)  # type: ignore[arg-type]
        dtype = model.compute_dtype
        self.weights = [_LayerWeights(each.self_attn.fused(dtype), each.mlp.fused(dtype)) for each in self.layers]
        # The first layer's projection of [embedding, hidden] is the sum of two: one a token, one a row and step.
        width = model.config.hidden_size
        first = self.weights[0].attention.qkv
        self.hidden_projection = first[:, width:]
        embedded = F.embedding(batch.token_ids, model.embed_tokens.weight).to(dtype)
        normed = self.layers[0].input_layernorm(embedded)
        self.embedding_share = F.linear(normed, first[:, :width])  # [R, q + 2 kv]
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]

    def step(self, step: int, hidden: Tensor) -> Tensor:
        """Hidden [R, H] (step 0) or [n, H] → the last layer's output [n, H] before the final norm."""
        rows = self.batch.steps[step].rows
        if step:
            table = self.model.rotary(self.batch.positions[rows] + step)
            for index in range(len(self.layers)):
                hidden = self._layer(index, step, hidden, rows, rows, table)
            return hidden
        # At step 0 every row leaves keys and values; queries of the last layer are needed for the chains alone.
        everything = self.model.rotary(self.batch.positions)
        for index in range(len(self.layers)):
            is_last = index == len(self.layers) - 1
            hidden = self._layer(index, 0, hidden, None, rows if is_last else None, everything)
        return hidden

    def _layer(
        self, index: int, step: int, hidden: Tensor, rows: Tensor | None, wanted: Tensor | None, table: RotaryTable
    ) -> Tensor:
        """One layer.

        Args:
            hidden: of the rows *rows*.
            rows: which rows come in; None: all.
            wanted: which rows go out: *rows*, or a part of all.
            table: rotary tables of the rows that come in.
        """
        layer, weights = self.layers[index], self.weights[index]
        residual, normed = self._inputs(layer, index, hidden)
        selected = wanted if rows is None else None
        chosen = normed if selected is None else _chosen(normed, selected)
        if selected is not None:
            residual = _chosen(residual, selected)
        size = self.model.config.query_size
        if selected is None:
            # One product for queries, keys and values.
            projected = self._project(index, step, normed, rows, slice(None))
            queries, others = projected[:, :size], projected[:, size:]
            query_table = table
        else:
            queries = self._project(index, step, chosen, selected, slice(0, size))
            others = self._project(index, step, normed, rows, slice(size, None))
            query_table = RotaryTable(*(_chosen(each, selected) for each in table))
        query = layer.self_attn.query(queries, weights.attention, query_table)
        key, value = layer.self_attn.key_value(others, weights.attention, table)
        self.cache[index].append((self._spread(key, rows), self._spread(value, rows)))
        (first_key, first_value), *chain = self.cache[index]
        attended = self.attend(
            self._spread(query, wanted), first_key, first_value, chain, self.batch.document_lengths
        ).flatten(1)
        if wanted is not None:
            attended = _chosen(attended, wanted)
        hidden = residual + F.linear(attended, weights.attention.o)
        return hidden + layer.mlp.apply_fused(layer.post_attention_layernorm(hidden), weights.mlp)

    def _inputs(self, layer: DraftLayer, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual and the normed input of attention (its hidden half, in the first layer)."""
        if index:
            return hidden, layer.input_layernorm(hidden)
        normed = layer.hidden_norm(hidden)
        return (normed if self.model.options.norm_before_residual else hidden), normed

    def _project(self, index: int, step: int, normed: Tensor, rows: Tensor | None, part: slice) -> Tensor:
        if index:
            return F.linear(normed, self.weights[index].attention.qkv[part])
        share = self.embedding_share[:, part]
        # Row t reads x_{t+1+k} at step k: the token of row t + k, which is in its document wherever a chain is alive.
        share = share if rows is None else _chosen(share, rows + step)
        return share + F.linear(normed, self.hidden_projection[part])

    def _spread(self, chosen: Tensor, rows: Tensor | None) -> Tensor:
        """[n, …] of some rows → [R, …], zero elsewhere; nobody reads a row whose chain has ended."""
        total = self.batch.token_ids.shape[0]
        if rows is None or chosen.shape[0] == total:
            return chosen
        return chosen.new_zeros(total, *chosen.shape[1:]).index_copy(0, rows, chosen)
