"""The heads, against what the paper writes, slot by slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftsmith_dspark.heads import ConfidenceHead, MarkovHead, SlotOrder, markov_head
from draftsmith_dspark.options import MarkovKind

TARGET, DRAFT, RANK, WIDTH = 40, 24, 6, 10
KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


def made(kind: MarkovKind, seed: int = 0) -> MarkovHead:
    """A head with weights so large that every path matters."""
    head = markov_head(kind, target_size=TARGET, draft_size=DRAFT, rank=RANK, hidden_size=WIDTH)
    assert head is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def slot_order(lengths: list[int]) -> SlotOrder:
    return SlotOrder(
        torch.tensor([block for block, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64),
        torch.tensor([step for length in lengths for step in range(length)], dtype=torch.int64),
    )


def by_hand(head: MarkovHead, kind: MarkovKind, hidden: Tensor, previous: Tensor, order: SlotOrder) -> Tensor:
    """bias [N, V_d], one slot after the other."""
    state = torch.zeros(RANK)
    rows = []
    for slot in range(previous.shape[0]):
        if order.step[slot] == 0:
            state = torch.zeros(RANK)
        e, h = head.markov_w1.weight[previous[slot]], hidden[slot]
        u = e
        if kind == "gated":
            u = torch.sigmoid(head.gate_proj(torch.cat((h, e)))) * e
        if kind == "rnn":
            z1, z2, z3 = head.joint_proj(torch.cat((state, e, h))).chunk(3)
            g = torch.sigmoid(z1)
            state = g * state + (1 - g) * torch.tanh(z2)
            u = torch.tanh(z3)
        rows.append(head.markov_w2.weight @ u)
    return torch.stack(rows) if rows else torch.zeros(0, DRAFT)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(1, 5), max_size=5), seed=st.integers(0, 3))
def test_a_correction_is_what_the_paper_writes(kind: MarkovKind, lengths: list[int], seed: int) -> None:
    """Whatever the lengths of the blocks: none of a block reaches another."""
    head, order = made(kind, seed), slot_order(lengths)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths), WIDTH, generator=generator)
    previous = torch.randint(0, TARGET, (sum(lengths),), generator=generator)
    low_rank = head.low_rank(hidden, head.embed(previous), order)
    assert low_rank.shape == (sum(lengths), RANK)
    torch.testing.assert_close(
        low_rank @ head.markov_w2.weight.T, by_hand(head, kind, hidden, previous, order), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_corrects_nothing_and_can_learn(kind: MarkovKind) -> None:
    torch.manual_seed(0)
    head = markov_head(kind, target_size=TARGET, draft_size=DRAFT, rank=RANK, hidden_size=WIDTH)
    assert head is not None
    head.initialise(0.02)
    order, hidden = slot_order([3, 2]), torch.randn(5, WIDTH)
    low_rank = head.low_rank(hidden, head.embed(torch.tensor([1, 5, 9, 1, 39])), order)
    bias = low_rank @ head.markov_w2.weight.T
    assert not bias.any()
    assert 0.007 < head.markov_w1.weight.std() < 0.013
    bias.sum().backward()
    assert head.markov_w2.weight.grad is not None
    assert head.markov_w2.weight.grad.abs().max() > 1e-4


def test_rank_zero_is_no_head() -> None:
    assert markov_head("vanilla", target_size=TARGET, draft_size=DRAFT, rank=0, hidden_size=WIDTH) is None


def test_names_and_shapes_are_those_of_the_format() -> None:
    shapes = {kind: {name: tuple(each.shape) for name, each in made(kind).state_dict().items()} for kind in KINDS}
    tables = {"markov_w1.weight": (TARGET, RANK), "markov_w2.weight": (DRAFT, RANK)}
    assert shapes["vanilla"] == tables
    assert shapes["gated"] == {
        **tables,
        "gate_proj.weight": (RANK, WIDTH + RANK),
        "gate_proj.bias": (RANK,),
    }
    assert shapes["rnn"] == {
        **tables,
        "joint_proj.weight": (3 * RANK, 2 * RANK + WIDTH),
        "joint_proj.bias": (3 * RANK,),
    }


@pytest.mark.parametrize("rank", [0, RANK])
def test_confidence(rank: int) -> None:
    head = ConfidenceHead(WIDTH, rank)
    hidden, embedded = torch.randn(4, WIDTH), torch.randn(4, RANK)
    inputs = torch.cat((hidden, embedded), -1) if rank else hidden
    want = inputs @ head.proj.weight[0] + head.proj.bias
    torch.testing.assert_close(head(hidden, embedded if rank else None), want)
    # in float32, as vLLM computes it, although the rest is not
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(hidden, embedded if rank else None), head(hidden, embedded if rank else None).float())
        assert head(hidden.bfloat16(), embedded if rank else None).dtype == torch.float32
    head.cool(2.5)
    torch.testing.assert_close(head(hidden, embedded if rank else None), want / 2.5)
