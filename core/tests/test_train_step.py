"""One optimiser step of a real small algorithm: reductions, accumulation, faults before the weights are touched."""

from __future__ import annotations

import importlib
from pathlib import Path

import attrs
import pytest
import torch

from draftsmith.errors import NumericsError
from draftsmith.interfaces import DraftSlots, StateLayout
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train import scoring
from draftsmith.train.metrics import divide
from draftsmith.train.rows import padding_row, to_device
from draftsmith.train.step import reduce_loss, score_row, train_step

TINY = Path(__file__).parent / "tiny"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("verifier"), "llama")


@pytest.fixture
def case(monkeypatch):
    monkeypatch.syspath_prepend(str(TINY))
    return importlib.import_module("draftsmith_tiny.case")


@pytest.fixture
def setup(case, verifier):
    return case.setup(verifier, dropout=0.0, starts=1.0)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def slots(weight, total_positions):
    empty = torch.zeros(len(weight), dtype=torch.int64)
    return DraftSlots(
        terms=(),
        teacher_row=empty,
        step=empty,
        chain=empty,
        weight=torch.tensor(weight),
        total_positions=total_positions,
        num_steps=1,
    )


@pytest.mark.parametrize(
    ("reduction", "expected", "denominator"),
    [("masked_mean", (4 + 1) / 2, 2), ("weighted_mean", (4 + 1) / 1.5, 1.5), ("local_mean", (4 + 1) / 10, 10)],
)
def test_reductions(reduction, expected, denominator):
    loss = torch.tensor([4.0, 2.0, float("nan")])
    counted = torch.tensor([True, True, False])
    value, divisor = reduce_loss(loss, slots([1.0, 0.5, 1.0], 10), counted, reduction)
    assert value.item() == pytest.approx(expected)
    assert divisor.item() == pytest.approx(denominator)


@pytest.mark.parametrize("reduction", ["masked_mean", "weighted_mean", "local_mean"])
def test_nothing_that_counts_is_zero_not_nan(reduction):
    value, _ = reduce_loss(torch.tensor([4.0]), slots([1.0], 10), torch.tensor([False]), reduction)
    assert value.item() == 0.0


@pytest.mark.parametrize("out_of_vocabulary", ["renormalise", "mask"])
def test_a_head_in_training_takes_one_pass_over_the_vocabulary(case, verifier, monkeypatch, out_of_vocabulary):
    """The weights that the loss will be reduced with are known before it is scored."""
    reduced = case.setup(verifier, draft_size=80, dropout=0.0)
    objective = case.objective(reduced, out_of_vocabulary=out_of_vocabulary, reduction="weighted_mean")
    objective.model.head.weight.requires_grad_(True)
    row = case.row(reduced)
    token, logsumexp = objective.teacher.statistics(row.last_hidden)
    row = attrs.evolve(row, teacher_token=token, teacher_logsumexp=logsumexp)
    walks = []
    walk = scoring._Scorer.walk
    monkeypatch.setattr(scoring._Scorer, "walk", lambda *a, **k: (walks.append(1), walk(*a, **k))[1])
    score = score_row(objective, row, case.generators(1)[0])
    score.value.backward()
    assert objective.model.head.weight.grad.abs().sum() > 0
    assert len(walks) == 1
    assert 0 < score.scored.kept.float().mean() < 1


def test_an_empty_row_reaches_every_trained_weight(case, setup):
    objective = case.objective(setup)
    objective.model.head.weight.requires_grad_(True)
    row = case.row(setup)
    row = attrs.evolve(row, loss_mask=torch.zeros_like(row.loss_mask))
    score = score_row(objective, row, case.generators(1)[0])
    assert score.value.item() == 0
    score.value.backward()
    trained = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None] == []


def test_it_learns(case, setup):
    objective = case.objective(setup)
    optimizers = case.optimizers(objective.model, setup.verifier, learning_rate=3e-3)
    optimizers.set_rate(1.0)
    row = case.row(setup)
    losses = []
    for _ in range(60):
        result = train_step(objective, optimizers, [row], case.generators(1), clip_norm=1.0)
        losses.append(divide(result.pairs)["loss"])
    assert result.updated
    assert losses[-1] < 0.5 * losses[0]
    assert divide(result.pairs)["eal"] > 1.5


def test_an_algorithm_may_weigh_positions_by_what_the_draft_gets_right(case, setup, monkeypatch):
    objective = case.objective(setup, reduction="weighted_mean")
    row = case.row(setup)
    seen = {}

    def weights(self, slots, scored, counted):
        seen.update(slots=slots, scored=scored, counted=counted)
        return scored.top_probability.requires_grad_()  # a gradient that must not be followed

    monkeypatch.setattr(type(objective.algorithm), "weights", weights)
    score = score_row(objective, row, case.generators(1)[0])
    loss, weight = score.scored.loss.detach(), seen["scored"].top_probability.detach()
    assert bool(seen["counted"].all())
    assert weight.std() > 0
    assert score.value.item() == pytest.approx(float((loss * weight).sum() / weight.sum()), rel=1e-5)
    assert score.denominator.item() == pytest.approx(float(weight.sum()), rel=1e-5)
    assert not score.slots.weight.requires_grad
    assert torch.equal(score.slots.weight, weight)


@pytest.mark.parametrize("reduction", ["masked_mean", "weighted_mean", "local_mean"])
def test_accumulated_rows_have_the_gradient_of_one_mean_over_all_positions(case, setup, reduction):
    rows = [case.row(setup, (12, 9), seed=1), case.row(setup, (25,), seed=2)]
    objective = case.objective(setup, reduction=reduction)
    optimizers = case.optimizers(objective.model, setup.verifier)
    optimizers.set_rate(0.0)
    result = train_step(objective, optimizers, rows, case.generators(2), clip_norm=1e9)
    accumulated = {name: p.grad.clone() for name, p in objective.model.named_parameters() if p.requires_grad}

    objective.model.zero_grad()
    scores = [score_row(objective, row, g) for row, g in zip(rows, case.generators(2), strict=True)]
    total = sum(score.value * score.denominator for score in scores) / sum(score.denominator for score in scores)
    total.backward()
    for name, parameter in objective.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(accumulated[name], parameter.grad, rtol=1e-4, atol=1e-7)
    assert divide(result.pairs)["loss"] == pytest.approx(total.item(), rel=1e-5)


def test_the_norm_is_that_of_the_mean_and_clipping_reaches_it(case, setup):
    row = case.row(setup)
    objective = case.objective(setup)
    optimizers = case.optimizers(objective.model, setup.verifier)
    optimizers.set_rate(0.0)
    score_row(objective, row, case.generators(1)[0]).value.backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in optimizers.parameters]).item()
    result = train_step(objective, optimizers, [row], case.generators(1), clip_norm=expected / 4)
    assert result.gradient_norm == pytest.approx(expected, rel=1e-5)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in optimizers.parameters]).item()
    assert clipped == pytest.approx(expected / 4, rel=1e-4)


def test_a_row_without_a_supervised_slot_is_a_zero_loss_that_changes_nothing(case, setup):
    objective = case.objective(setup)
    optimizers = case.optimizers(objective.model, setup.verifier)
    before = weights(objective.model)
    empty = case.without_states(case.row(setup), loss_mask=torch.zeros(21, dtype=torch.bool))
    score = score_row(objective, empty, case.generators(1)[0])
    assert score.value.item() == 0.0
    assert score.value.requires_grad  # ranks with nothing to learn still take part in the reduction of gradients
    result = train_step(objective, optimizers, [empty], case.generators(1), clip_norm=1.0)
    assert (result.updated, result.gradient_norm) == (False, 0.0)
    assert same(before, weights(objective.model))
    assert not optimizers.state_tensors()


def out_of_vocabulary(row, setup):
    """*row*, with a teacher whose every token the draft cannot propose."""
    lost = int((~setup.vocabulary.t2d).nonzero()[0])
    tokens = len(row.input_ids)
    return attrs.evolve(row, teacher_token=torch.full((tokens,), lost), teacher_logsumexp=torch.full((tokens,), 50.0))


def padding(setup):
    layout = StateLayout(
        fingerprint="f",
        layer_ids=setup.capture.ids(setup.verifier.num_layers),
        hidden_size=setup.verifier.hidden_size,
        dtype="bfloat16",
    )
    return to_device(padding_row(layout), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("reduction", ["masked_mean", "weighted_mean", "local_mean"])
@pytest.mark.parametrize("kind", ["unsupervised", "out of vocabulary", "padding"])
def test_where_no_position_counts_every_weight_has_a_gradient_of_zero_and_stays(case, verifier, reduction, kind):
    """Ranks add up their gradients: one with nothing to learn must have one of every weight all the same."""
    setup = case.setup(verifier, dropout=0.0, starts=1.0, draft_size=32)
    full = case.row(setup)
    nothing = {
        "unsupervised": attrs.evolve(full, loss_mask=torch.zeros(21, dtype=torch.bool)),
        "out of vocabulary": out_of_vocabulary(full, setup),
        "padding": padding(setup),
    }[kind]
    objective = case.objective(setup, reduction=reduction, out_of_vocabulary="mask")
    optimizers = case.optimizers(objective.model, setup.verifier)
    optimizers.set_rate(1.0)
    score = score_row(objective, nothing, case.generators(1)[0])
    assert (score.value.item(), score.counted.item()) == (0.0, 0.0)
    score.value.backward()
    trained = [each for each in objective.model.parameters() if each.requires_grad]
    assert all(each.grad is not None and not each.grad.any() for each in trained)
    # The moments of an earlier step would move the weights in a step of nothing.
    assert train_step(objective, optimizers, [full], case.generators(1), clip_norm=1.0).updated
    before, moments = weights(objective.model), weights_of(optimizers)
    result = train_step(objective, optimizers, [nothing], case.generators(1), clip_norm=1.0)
    assert (result.updated, result.gradient_norm) == (False, 0.0)
    assert same(before, weights(objective.model))
    assert same(moments, weights_of(optimizers))


@pytest.mark.parametrize(("kind", "share"), [("unsupervised", 0.5), ("padding", 1.0)])
def test_a_mean_over_all_positions_counts_those_of_a_row_without_targets(case, setup, kind, share):
    """But not the padding of a row that could not be read: nobody has seen those."""
    full = case.row(setup)
    empty = attrs.evolve(full, loss_mask=torch.zeros(21, dtype=torch.bool)) if kind == "unsupervised" else None
    objective = case.objective(setup, reduction="local_mean")
    optimizers = case.optimizers(objective.model, setup.verifier)
    optimizers.set_rate(0.0)
    alone = train_step(objective, optimizers, [full], case.generators(1), clip_norm=1e9)
    both = train_step(objective, optimizers, [full, empty or padding(setup)], case.generators(2), clip_norm=1e9)
    assert both.gradient_norm == pytest.approx(share * alone.gradient_norm, rel=1e-5)
    assert divide(both.pairs)["loss"] == pytest.approx(share * divide(alone.pairs)["loss"], rel=1e-5)


def test_an_empty_row_beside_a_full_one_changes_nothing_of_the_full_ones_step(case, setup):
    full = case.row(setup)
    empty = case.without_states(case.row(setup), loss_mask=torch.zeros(21, dtype=torch.bool))
    after = []
    for rows in ([full], [full, empty]):
        objective = case.objective(setup)
        optimizers = case.optimizers(objective.model, setup.verifier)
        optimizers.set_rate(1.0)
        train_step(objective, optimizers, rows, case.generators(len(rows)), clip_norm=1.0)
        after.append(weights(objective.model))
    for name in after[0]:
        torch.testing.assert_close(after[0][name], after[1][name], msg=name)


@pytest.mark.parametrize("field", ["taps", "last_hidden"])
def test_values_that_are_not_finite_stop_before_the_weights(case, setup, field):
    objective = case.objective(setup)
    optimizers = case.optimizers(objective.model, setup.verifier)
    good, row = case.row(setup, seed=1), case.row(setup, seed=2)
    train_step(objective, optimizers, [good], case.generators(1), clip_norm=1.0)
    before, moments = weights(objective.model), weights_of(optimizers)
    states = getattr(row, field).clone()
    states[15] = float("nan")  # in the second document
    bad = attrs.evolve(row, **{field: states})
    with pytest.raises(NumericsError, match="not finite") as caught:
        train_step(objective, optimizers, [good, bad], case.generators(2), clip_norm=1.0)
    assert caught.value.where == f"samples {row.sample_ids[1]}"
    assert same(before, weights(objective.model))
    assert same(moments, weights_of(optimizers))


def weights_of(optimizers):
    return {name: tensor.clone() for name, tensor in optimizers.state_tensors().items()}


def test_a_gradient_that_is_not_finite_stops_too(case, setup):
    objective = case.objective(setup)
    optimizers = case.optimizers(objective.model, setup.verifier)
    before = weights(objective.model)
    objective.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    row = case.row(setup)
    with pytest.raises(NumericsError, match="gradient is not finite") as caught:
        train_step(objective, optimizers, [row], case.generators(1), clip_norm=1.0)
    assert all(name in caught.value.where for name in row.sample_ids)
    assert same(before, weights(objective.model))


def test_masking_leaves_out_what_the_draft_cannot_propose_and_metrics_count_it_wrong(case, verifier):
    setup = case.setup(verifier, dropout=0.0, starts=1.0, draft_size=32)
    row = case.row(setup)
    scores = {
        policy: score_row(case.objective(setup, out_of_vocabulary=policy), row, case.generators(1)[0])
        for policy in ("renormalise", "mask")
    }
    kept = scores["mask"].scored.kept
    assert 0 < kept.sum() < len(kept)
    assert scores["renormalise"].denominator == len(kept)
    assert scores["mask"].denominator == kept.sum()
    assert scores["mask"].value.item() == pytest.approx(scores["mask"].scored.loss[kept].mean().item())
    assert not (scores["mask"].scored.correct & ~kept).any()
    counts = {name: pair[1].item() for name, pair in scores["mask"].pairs.items() if name.startswith("position")}
    assert sum(counts.values()) == len(kept)


def test_only_the_draft_is_trained(case, setup):
    objective = case.objective(setup)
    optimizers = case.optimizers(objective.model, setup.verifier)
    optimizers.set_rate(1.0)
    before = weights(objective.model)
    train_step(objective, optimizers, [case.row(setup)], case.generators(1), clip_norm=1.0)
    after = weights(objective.model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == before.keys() - objective.model.shared_tensors().keys()


def test_bfloat16_compute_keeps_float32_weights_gradients_and_loss(case, setup):
    setup = attrs.evolve(setup, compute_dtype=torch.bfloat16)
    objective = case.objective(setup, compute_dtype=torch.bfloat16)
    optimizers = case.optimizers(objective.model, setup.verifier)
    optimizers.set_rate(1.0)
    row = case.row(setup)
    score = score_row(objective, row, case.generators(1)[0])
    assert score.value.dtype == score.scored.loss.dtype == torch.float32
    exact = score_row(case.objective(setup), row, case.generators(1)[0]).value.item()
    assert score.value.item() == pytest.approx(exact, rel=2e-2)
    assert score.value.item() != exact
    train_step(objective, optimizers, [row], case.generators(1), clip_norm=1.0)
    assert {parameter.dtype for parameter in objective.model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in optimizers.parameters} == {torch.float32}
    assert {tensor.dtype for tensor in optimizers.state_tensors().values()} == {torch.float32}
