"""Training a recurrent draft: the network around its step, and the forward over all chains side by side.

Shapes: n chains, H the verifier's width, R rows, T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, DraftArchitecture, DraftSlots, PackedRow
from draftsmith.layers import Weight, draft_head
from draftsmith.rows import ChainStep, ShiftedRow, chain_slots, chain_steps, shift_by_one

__all__ = ["RecurrentAlgorithm", "RecurrentBatch", "RecurrentDraft"]


class RecurrentDraft(DraftArchitecture, nn.Module):
    """A step between the verifier's embedding and its head. Derive from it, and pass the step on to ``__init__``.

    Attributes:
        step: ``step(embedded [n, H], state [n, H]) -> (output [n, H], state [n, H])``: the head reads *output*, the
            next step *state*. The same module runs in vLLM (:class:`~draftsmith.recurrent.served.ServedDraft`).
        embed_tokens, lm_head: the verifier's, frozen; neither trained nor exported.
    """

    def __init__(self, setup: AlgorithmSetup, step: nn.Module) -> None:
        nn.Module.__init__(self)
        self.step = step
        self.embed_tokens = Weight(setup.weights.embed_tokens.detach().float())
        self.lm_head = Weight(draft_head(setup.weights, setup.vocabulary, setup.compute_dtype))

    def forward(self, token_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n] and the states before them [n, H] → outputs, and the states after them, [n, H] each."""
        output, state = self.step(F.embedding(token_ids, self.embed_tokens.weight), state)
        return output, state

    def shared_tensors(self) -> Mapping[str, Tensor]:
        return {"embed_tokens.weight": self.embed_tokens.weight, "lm_head.weight": self.lm_head.weight}


@frozen(kw_only=True)
class RecurrentBatch:
    """Rows, the chains that begin there, and the verifier's last hidden state of x_t, after its final norm [R, H]."""

    rows: ShiftedRow
    steps: tuple[ChainStep, ...]
    hidden: Tensor


class RecurrentAlgorithm(DraftAlgorithm):
    """Trains a :class:`RecurrentDraft` with :class:`~draftsmith.recurrent.RecurrentOptions`. Left to write are
    ``build_model`` and ``drafter``."""

    def make_batch(self, row: PackedRow, generator: torch.Generator) -> RecurrentBatch:
        rows = shift_by_one(row)
        hidden = self.setup.weights.final_norm(row.taps[rows.packed_index - 1].float())
        steps = chain_steps(rows, self.setup.options.num_tokens)
        return RecurrentBatch(rows=rows, steps=steps, hidden=hidden)

    def forward(self, model: nn.Module, batch: RecurrentBatch) -> DraftSlots:
        state, outputs = batch.hidden[batch.steps[0].rows], []
        for step, alive in enumerate(batch.steps):
            # The chains that go on; each is fed what the verifier wrote there, as if it had drafted it.
            output, state = model(batch.rows.token_ids[alive.rows + step], state[alive.kept])
            outputs.append(output)
        decay = self.setup.options.step_decay
        head = model.get_submodule("lm_head").get_parameter("weight")
        return chain_slots(batch.rows, batch.steps, outputs, head, decay=decay)
