"""What DSpark adds to a training step: which token corrects which slot, the objective, and the last hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import attrs
import pytest
import torch

from draftsmith.interfaces import DraftSlots, PackedRow, ScoredSlots
from draftsmith.plugins import load_plugins
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, slot_logits, tiny_case
from draftsmith.train.setup import build_loss
from draftsmith_dspark.model import DSparkDraft
from draftsmith_dspark.step import CONFIDENCE, DSpark

SMALL = {"num_layers": 1, "markov_rank": 6}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("verifier"), "llama")


@pytest.fixture(scope="module")
def case(material: Material) -> AlgorithmCase:
    return tiny_case(material, "dspark", options=SMALL, draft_size=64)


def draft(case: AlgorithmCase, seed: int = 0) -> DSparkDraft:
    """With heads that do something."""
    torch.manual_seed(seed)
    model = case.algorithm.build_model()
    assert isinstance(model, DSparkDraft)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.startswith(("markov_head", "confidence_head")):
                parameter.normal_(0, 0.5)
    return model


def forward(case: AlgorithmCase, model: DSparkDraft, row: PackedRow | None = None) -> DraftSlots:
    batch = case.algorithm.make_batch(row or case.row, torch.Generator().manual_seed(0))
    return case.algorithm.forward(model, batch)


def scored_with(slots: DraftSlots, acceptance: torch.Tensor) -> ScoredSlots:
    one, yes = torch.ones_like(acceptance), torch.ones_like(acceptance, dtype=torch.bool)
    return ScoredSlots(loss=one, correct=yes, acceptance=acceptance, kept_mass=one, kept=yes, top_probability=one)


# --- slots ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["anchor_first", "bonus_anchor"])
def test_each_slot_is_corrected_by_the_token_before_the_one_it_predicts(material: Material, layout: str) -> None:
    """In both layouts: slot s after anchor p predicts x_{p+s+1}, and x_{p+s} corrects it."""
    case = tiny_case(material, "dspark", options={**SMALL, "layout": layout, "block_size": 4}, draft_size=64)
    model = draft(case)
    slots = forward(case, model)
    assert slots.num_steps == (4 if layout == "anchor_first" else 3)
    assert set(slots.step.tolist()) == set(range(slots.num_steps))
    assert model.markov_head is not None
    (_, head), (low_rank, w2) = slots.terms
    assert head is model.lm_head.weight
    assert w2 is model.markov_head.markov_w2.weight
    before = case.row.input_ids[slots.teacher_row]
    assert torch.equal(low_rank, model.markov_head.markov_w1.weight[before])
    anchors = slots.teacher_row - slots.step
    for chain in slots.chain.unique():
        members = slots.chain == chain
        assert anchors[members].unique().numel() == 1
        assert slots.step[members].tolist() == list(range(int(members.sum())))


def test_every_row_of_an_anchor_first_block_is_supervised_and_none_beyond_the_answer(case: AlgorithmCase) -> None:
    """The mask is that of the predicted tokens, x_{p+1} … x_{p+s+1}, not of the rows'."""
    slots = forward(case, draft(case))
    row = case.row
    begins = slots.teacher_row - slots.step
    got = {(int(anchor), int(step)) for anchor, step in zip(begins, slots.step, strict=True)}
    want = set()
    for anchor in range(row.input_ids.shape[0]):
        for step in range(slots.num_steps):
            span = slice(anchor, anchor + step + 2)
            inside = anchor + step + 1 < row.input_ids.shape[0]
            same = len(set(row.document_ids[span].tolist())) == 1 and int(row.document_ids[anchor]) >= 0
            if inside and same and bool(row.loss_mask[span].all()) and int(row.position_ids[anchor]) > 0:
                want.add((anchor, step))
    assert got == want


def test_a_fresh_draft_is_its_backbone(case: AlgorithmCase) -> None:
    torch.manual_seed(0)
    model = case.algorithm.build_model()
    assert isinstance(model, DSparkDraft)
    slots = forward(case, model)
    hidden, head = slots.terms[0]
    assert torch.equal(slot_logits(slots), hidden.float() @ head.float().T)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"markov_head": "rnn", "layout": "bonus_anchor"},
        {"markov_head": "gated", "confidence_with_markov": False},
        {"markov_rank": 0, "confidence_with_markov": False},
        {"confidence": False},
    ],
)
def test_the_confidence_of_the_replay_is_that_of_training(material: Material, options: dict[str, Any]) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, **options}, draft_size=64)
    model = draft(case).eval()
    row = case.documents[0]
    slots = forward(case, model, row)
    drafter = case.algorithm.drafter(model)
    for chain in slots.chain.unique()[::3]:
        members = slots.chain == chain
        anchor = int((slots.teacher_row - slots.step)[members][0])
        forced = torch.zeros(slots.num_steps, dtype=torch.int64)
        after = row.input_ids[anchor + 1 : anchor + 1 + slots.num_steps]
        forced[: len(after)] = after
        drafter.propose(row.input_ids[: anchor + 1], row.taps[:anchor], slots.num_steps, forced=forced)
        replayed = drafter.confidence  # type: ignore[attr-defined]
        if not case.algorithm.setup.options.confidence:
            assert replayed is None
            assert CONFIDENCE not in slots.extra
            continue
        torch.testing.assert_close(
            replayed[: int(members.sum())], slots.extra[CONFIDENCE][members], rtol=1e-4, atol=1e-4
        )


def test_a_row_without_slots_reaches_every_weight(case: AlgorithmCase) -> None:
    model = draft(case)
    row = attrs.evolve(case.row, loss_mask=torch.zeros_like(case.row.loss_mask))
    slots = forward(case, model, row)
    assert slots.teacher_row.numel() == 0
    (hidden, _), (low_rank, w2) = slots.terms
    total = hidden.sum() + low_rank.sum() + 0.0 * w2.sum()
    total.backward()
    assert total.item() == 0
    assert model.confidence_head is not None
    heads = [name for name, p in model.named_parameters() if "_head" in name and p.requires_grad and p.grad is None]
    assert heads == []


# --- objective --------------------------------------------------------------------------------------------------


def test_the_objective_is_the_papers(case: AlgorithmCase) -> None:
    """loss + weighted mean of BCE(confidence, 1 - TV), weights exp(-k/4)."""
    model = draft(case)
    slots = forward(case, model)
    acceptance = torch.rand(slots.step.shape, generator=torch.Generator().manual_seed(1))
    loss = torch.tensor(1.5)
    value, metrics = case.algorithm.objective(slots, scored_with(slots, acceptance), loss)
    logits = slots.extra[CONFIDENCE].detach()
    p = torch.sigmoid(logits)
    each = -(acceptance * p.log() + (1 - acceptance) * (1 - p).log())
    weight = torch.exp(-slots.step / 4)
    torch.testing.assert_close(value.detach(), 1.5 + (each * weight).sum() / weight.sum())
    torch.testing.assert_close(slots.weight, weight)
    ratio = {name: float(total / count) for name, (total, count) in metrics.items()}
    assert ratio["confidence_loss"] == pytest.approx(float((each * weight).sum() / weight.sum()), rel=1e-5)
    assert ratio["confidence_abs_error"] == pytest.approx(float((p - acceptance).abs().mean()), rel=1e-5)
    assert ratio["confidence_bias"] == pytest.approx(float((p - acceptance).mean()), abs=1e-5)


def test_muon_takes_the_network_and_not_what_has_a_row_for_every_token(material: Material) -> None:
    """Also where the draft's vocabulary is as large as the network's own sizes."""
    from draftsmith.train.optimizers import muon_names

    options = {"num_layers": 1, "markov_rank": 8, "hidden_size": 96, "intermediate_size": 64}
    case = tiny_case(material, "dspark", options=options, draft_size=64)
    taken = muon_names(case.algorithm.build_model(), {64, case.algorithm.setup.verifier.vocab_size})
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in taken} == {
        *("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_the_default_loss_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from draftsmith.cli.plugins import print_one

    print_one(load_plugins(), "dspark")
    assert 'sum {"terms": {"ce": 0.1, "tv": 1.8}}' in capsys.readouterr().out


def test_the_default_loss_has_the_papers_weights(case: AlgorithmCase) -> None:
    """0.9 times the L1 distance is 1.8 times the total variation."""
    assert case.registered.loss == "sum"
    loss = build_loss(load_plugins().losses, case.registered.loss, case.registered.loss_options)
    from draftsmith.interfaces import TeacherChunk

    generator = torch.Generator().manual_seed(0)
    z, t = torch.randn(5, 9, generator=generator), torch.randn(5, 9, generator=generator)
    p, q = t.softmax(-1), z.softmax(-1)
    chunk = TeacherChunk(t.log_softmax(-1), torch.ones(5), t.argmax(-1))
    want = 0.1 * -q.gather(-1, t.argmax(-1, keepdim=True)).squeeze(-1).log() + 0.9 * (p - q).abs().sum(-1)
    torch.testing.assert_close(loss.value(z, chunk), want)
    assert case.registered.reduction == "weighted_mean"


def test_the_confidences_gradient_reaches_hidden_states_and_embeddings(case: AlgorithmCase) -> None:
    model = draft(case)
    slots = forward(case, model)
    acceptance = torch.full(slots.step.shape, 0.3, requires_grad=True)
    value, _ = case.algorithm.objective(slots, scored_with(slots, acceptance.detach()), torch.zeros(()))
    value.backward()
    assert model.markov_head is not None
    for parameter in (model.fc.weight, model.markov_head.markov_w1.weight):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    assert model.markov_head.markov_w2.weight.grad is None  # it has no part in the confidence
    assert acceptance.grad is None


@pytest.mark.parametrize(("options", "factor"), [({"confidence_weight": 0.0}, 0.0), ({"confidence_weight": 2.5}, 2.5)])
def test_the_weight_of_the_confidence(material: Material, options: dict[str, Any], factor: float) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, **options})
    slots = forward(case, draft(case))
    scored = scored_with(slots, torch.full(slots.step.shape, 0.3))
    value, metrics = case.algorithm.objective(slots, scored, torch.ones(()))
    total, count = metrics["confidence_loss"]
    torch.testing.assert_close(value.detach(), 1 + factor * total / count)


def test_without_the_head_the_objective_is_the_loss(material: Material) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, "confidence": False})
    slots = forward(case, draft(case))
    loss = torch.ones(())
    value, metrics = case.algorithm.objective(slots, scored_with(slots, torch.ones(slots.step.shape)), loss)
    assert value is loss
    assert not metrics
    assert case.algorithm.finish(draft(case), validation(case, draft(case), 0.5)) == {}


def test_pace_weighs_the_loss_and_not_the_confidence(material: Material) -> None:
    case = tiny_case(material, "dspark", options={**SMALL, "position_weights": "d_pace"})
    slots = forward(case, draft(case))
    scored = scored_with(slots, torch.rand(slots.step.shape, generator=torch.Generator().manual_seed(1)))
    scored = attrs.evolve(scored, top_probability=scored.acceptance)
    weights = case.algorithm.weights(slots, scored, scored.kept)
    assert not torch.equal(weights, slots.weight)
    plain, _ = case.algorithm.objective(slots, scored, torch.zeros(()))
    paced, _ = case.algorithm.objective(attrs.evolve(slots, weight=weights), scored, torch.zeros(()))
    assert torch.equal(plain, paced)


# --- the last hand ----------------------------------------------------------------------------------------------


def validation(
    case: AlgorithmCase, model: DSparkDraft, temperature: float
) -> Iterable[tuple[DraftSlots, ScoredSlots]]:
    """Rows on which the head's logits are *temperature* times too large."""
    with torch.no_grad():
        for row in (case.documents[0], case.documents[1]):
            slots = forward(case, model, row)
            logits = slots.extra.get(CONFIDENCE, torch.zeros(slots.step.shape))
            yield slots, scored_with(slots, torch.sigmoid(logits / temperature))


def test_the_head_is_calibrated_in_place(case: AlgorithmCase) -> None:
    model = draft(case).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = forward(case, model).extra[CONFIDENCE].detach()
    figures = case.algorithm.finish(model, list(validation(case, model, 2.5)))
    assert figures["confidence_temperature"] == pytest.approx(2.5, rel=1e-2)
    assert figures["confidence_ece_after"] < 1e-3 < figures["confidence_ece_before"]
    torch.testing.assert_close(forward(case, model).extra[CONFIDENCE].detach(), logits / 2.5, rtol=1e-2, atol=1e-3)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def test_rows_are_calibrated_on_one_at_a_time(case: AlgorithmCase) -> None:
    """A row's slots hold its hidden states: those of all rows together need not fit the memory."""
    model, held = draft(case).eval(), weakref.WeakSet[torch.Tensor]()

    def rows() -> Iterable[tuple[DraftSlots, ScoredSlots]]:
        for _ in range(6):
            yield from validation(case, model, 2.5)

    def counted() -> Iterable[tuple[DraftSlots, ScoredSlots]]:
        for slots, scored in rows():
            held.add(slots.terms[0][0])
            assert len(held) <= 3
            yield slots, scored

    assert case.algorithm.finish(model, counted())


def test_without_validation_rows_nothing_is_changed(case: AlgorithmCase) -> None:
    model = draft(case)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert isinstance(case.algorithm, DSpark)
    assert case.algorithm.finish(model, []) == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
