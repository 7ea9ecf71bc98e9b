"""The verifier by transformers, as verification needs it: greedy answers where there is no vLLM, features for the
simulator, logits at a difference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from draftsmith.capture.engines.transformers import hidden_states

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["batches_by_length", "features", "generate_greedily", "last_logits"]


def batches_by_length(lengths: Sequence[int], batch_tokens: int, batch_size: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, each of at most *batch_tokens* tokens, padding included."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda each: lengths[each]):
        if batch and ((len(batch) + 1) * lengths[index] > batch_tokens or len(batch) == batch_size):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def generate_greedily(
    model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int, beyond: int, eos_token_ids: Collection[int]
) -> list[list[int]]:
    """Greedy answers of a batch of prompts, going on *beyond* the end of turn by that many tokens.

    Returns:
        For each prompt up to max_tokens + beyond tokens; at least *beyond* of them follow the first end of turn.
    """
    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all answers begin in one column
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = None
    answers: list[list[int]] = [[] for _ in prompts]
    ended_at: list[int | None] = [None] * len(prompts)
    for count in range(1, max_tokens + beyond + 1):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        cache = out.past_key_values
        newest = out.logits[:, -1].argmax(dim=-1)
        for row, token in enumerate(newest.tolist()):
            answers[row].append(token)
            if token in eos_token_ids and ended_at[row] is None:
                ended_at[row] = count
        if all(end is not None and count >= end + beyond for end in ended_at):
            break
        ids = newest[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return answers


def features(
    model: nn.Module, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int], *, batch_tokens: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, taps [T, A * H_t]) of each sequence, in batches of similar length."""
    device = next(model.parameters()).device
    lengths = [len(sequence) for sequence in sequences]
    for batch in batches_by_length(lengths, batch_tokens, len(sequences)):
        width = max(lengths[index] for index in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width, dtype=torch.bool)
        for row, index in enumerate(batch):
            ids[row, : lengths[index]] = torch.tensor(sequences[index])
            mask[row, : lengths[index]] = True
        states = hidden_states(model, ids.to(device), mask.to(device), layer_ids)
        for row, index in enumerate(batch):
            yield index, states[row, : lengths[index]].flatten(1)


@torch.inference_mode()
def last_logits(model: nn.Module, token_ids: Sequence[int]) -> Tensor:
    """float32 [V_t]: the verifier's logits after *token_ids*."""
    device = next(model.parameters()).device
    out = model(input_ids=torch.tensor([list(token_ids)], device=device), use_cache=False, logits_to_keep=1)
    logits: Tensor = out.logits[0, -1].float()
    return logits
