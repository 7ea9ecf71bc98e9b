"""Metrics against definitions written out by hand, chain by chain."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.interfaces import DraftSlots, ScoredSlots
from draftsmith.train.metrics import add_pairs, divide, slot_metrics

K = 4


def score(chains, *, shuffle=0, num_steps=K):
    """*chains*: one dict step → (correct, overlap) each."""
    slots = [(c, k, *value) for c, chain in enumerate(chains) for k, value in chain.items()]
    random.Random(shuffle).shuffle(slots)
    count = len(slots)
    chain, step, correct, overlap = zip(*slots, strict=True) if slots else ((), (), (), ())
    drafted = DraftSlots(
        terms=(),
        teacher_row=torch.zeros(count, dtype=torch.int64),
        step=torch.tensor(step, dtype=torch.int64),
        chain=torch.tensor(chain, dtype=torch.int64),
        weight=torch.ones(count),
        total_positions=count,
        num_steps=num_steps,
    )
    scored = ScoredSlots(
        loss=torch.zeros(count),
        correct=torch.tensor(correct, dtype=torch.bool),
        acceptance=torch.tensor(overlap, dtype=torch.float32),
        kept_mass=torch.full((count,), 0.75),
        kept=torch.ones(count, dtype=torch.bool),
        top_probability=torch.full((count,), 0.5),
    )
    return slot_metrics(drafted, scored)


slot = st.tuples(st.booleans(), st.floats(0, 1, width=32))
complete = st.lists(st.lists(slot, min_size=K, max_size=K).map(lambda v: dict(enumerate(v))), min_size=1, max_size=9)
ragged = st.lists(st.dictionaries(st.integers(0, K - 1), slot, max_size=K), max_size=9)


def leading_run(chain):
    run = 0
    while run in chain and chain[run][0]:
        run += 1
    return run


@given(complete, st.integers(0, 9))
@settings(deadline=None)
def test_complete_chains_give_the_plain_ratios(chains, shuffle):
    values = divide(score(chains, shuffle=shuffle))
    runs = [leading_run(chain) for chain in chains]
    assert values["eal"] == pytest.approx(1 + sum(runs) / len(runs))
    for k in range(K):
        assert values[f"prefix_{k}"] == pytest.approx(sum(run > k for run in runs) / len(runs))
        assert values[f"position_{k}_acc"] == pytest.approx(sum(chain[k][0] for chain in chains) / len(chains))
        assert values[f"alpha_{k}"] == pytest.approx(sum(chain[k][1] for chain in chains) / len(chains))
        reached = [chain for chain, run in zip(chains, runs, strict=True) if run >= k]
        if reached:
            assert values[f"cond_acc_{k}"] == pytest.approx(sum(chain[k][0] for chain in reached) / len(reached))
        else:
            assert f"cond_acc_{k}" not in values
    expected = [sum(math.prod(chain[j][1] for j in range(k + 1)) for k in range(K)) for chain in chains]
    assert values["accept_len"] == pytest.approx(1 + sum(expected) / len(expected), rel=1e-6)
    assert values["coverage"] == pytest.approx(0.75)


@given(ragged)
@settings(deadline=None)
def test_identities_hold_for_chains_cut_short_or_full_of_gaps(chains):
    values = divide(score(chains))
    prefixes = [values[f"prefix_{k}"] for k in range(K) if f"prefix_{k}" in values]
    assert values["eal"] == pytest.approx(1 + sum(prefixes))
    conditional = [values.get(f"cond_acc_{k}", 0.0) for k in range(len(prefixes))]
    for k, prefix in enumerate(prefixes):
        assert prefix == pytest.approx(math.prod(conditional[: k + 1]))
    assert 1 <= values["accept_len"] <= 1 + K + 1e-9
    assert prefixes == sorted(prefixes, reverse=True)


def test_a_chain_cut_short_is_no_rejection():
    long = dict.fromkeys(range(K), (True, 1.0))
    short = {0: (True, 1.0)}
    values = divide(score([long, short]))
    assert values["eal"] == 1 + K
    assert values["accept_len"] == 1 + K
    assert values["prefix_3"] == 1.0


def test_a_chain_without_its_first_slot_counts_for_the_position_alone():
    values = divide(score([{1: (True, 0.5)}, {0: (False, 0.25), 1: (True, 0.5)}]))
    assert values["position_1_acc"] == 1.0
    assert values["prefix_0"] == 0.0
    assert values["eal"] == 1.0
    assert values["accept_len"] == pytest.approx(1 + 0.25 + 0.125)


def test_products_of_marginal_accuracies_would_understate():
    chains = [{0: (True, 1.0), 1: (True, 1.0)}, {0: (False, 0.0), 1: (False, 0.0)}]
    values = divide(score(chains, num_steps=2))
    assert values["prefix_1"] == 0.5 > values["position_0_acc"] * values["position_1_acc"]


@given(complete, complete)
@settings(deadline=None, max_examples=30)
def test_pairs_of_parts_add_up_to_the_pairs_of_the_whole(first, second):
    parts = divide(add_pairs([score(first), score(second)]))
    whole = divide(score(first + second))
    assert parts == pytest.approx(whole)


def test_no_slots_no_nan():
    pairs = score([])
    assert all(torch.isfinite(pair).all() for pair in pairs.values())
    assert divide(pairs) == {"eal": 1.0, "accept_len": 1.0}
    assert divide({}) == {}
