"""A whole set of prompts: answered by the verifier in this process, and drafted along by the simulator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from draftsmith.progress import stage_progress
from draftsmith.serving.simulator import Simulation, answer_length, simulate
from draftsmith.serving.verifier_model import batches_by_length, features, generate_greedily

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from draftsmith.interfaces import DraftAlgorithm

__all__ = ["answer_prompts", "simulate_answers"]

#: Tokens of the verifier's batches on a CPU. A layer's intermediate states then stay in its caches: with 8192 tokens
#: a 135M verifier runs at little more than half the speed.
CPU_BATCH_TOKENS = 512
#: Tokens of a batch that writes answers, padding included.
ANSWER_BATCH_TOKENS = 1 << 16


def answer_prompts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    beyond: int,
    eos_token_ids: Collection[int],
    *,
    batch_size: int,
    console: Console | None = None,
) -> list[list[int]]:
    """Greedy answers of all prompts, by transformers, each going on *beyond* its end by that many tokens."""
    answers: list[list[int]] = [[] for _ in prompts]
    with stage_progress(console, "answers by transformers", len(prompts), "answers") as bar:
        for batch in batches_by_length([len(each) for each in prompts], ANSWER_BATCH_TOKENS, batch_size):
            made = generate_greedily(model, [prompts[index] for index in batch], max_tokens, beyond, eos_token_ids)
            for index, answer in zip(batch, made, strict=True):
                answers[index] = answer
            bar.advance(len(batch))
    return answers


def simulate_answers(
    algorithm: DraftAlgorithm,
    draft: nn.Module,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    continued: Sequence[Sequence[int]],
    num_speculative_tokens: int,
    *,
    eos_token_ids: Collection[int],
    max_tokens: int,
    batch_tokens: int,
    console: Console | None = None,
) -> list[Simulation]:
    """Draft along known greedy outputs, with the verifier's features at their tokens.

    Args:
        model: the verifier.
        continued: the outputs, each going on for K tokens beyond its answer's end.
        batch_tokens: of the verifier's batches; less on a CPU.
    """
    device = next(model.parameters()).device
    ends = [answer_length(each, eos_token_ids, max_tokens) + num_speculative_tokens for each in continued]
    sequences = [[*prompt, *output[:end]] for prompt, output, end in zip(prompts, continued, ends, strict=True)]
    simulations: dict[int, Simulation] = {}
    with stage_progress(console, "simulator", len(prompts), "answers") as bar:
        width = CPU_BATCH_TOKENS if device.type == "cpu" else batch_tokens
        for index, taps in features(model, sequences, algorithm.setup.capture.layer_ids, batch_tokens=width):
            simulations[index] = simulate(
                algorithm,
                draft,
                torch.tensor(sequences[index], device=device),
                taps.float(),
                len(prompts[index]),
                num_speculative_tokens,
                eos_token_ids=eos_token_ids,
                max_tokens=max_tokens,
            )
            bar.advance(1)
    return [simulations[index] for index in range(len(prompts))]
