"""Conformance tests of algorithms: what is trained is what is served.

from draftsmith.testing.algorithm import AlgorithmCase, AlgorithmTests, make_material, tiny_case

@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("verifier"), "qwen3")

class TestMyIdea(AlgorithmTests):
    @pytest.fixture
    def case(self, material):
        return tiny_case(material, "my_idea", options={"depth": 3}, draft_size=48)

The case is a real (tiny, random) verifier with the states that it gives to a few packed documents, and the algorithm
as the installed plugins register it. Demanded are: replay equivalence, no leaks, packing invariance, sensible initial
values, full marks for the teacher as its own draft, overfitting, and the same logits after saving and loading.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

from draftsmith.api import Algorithm, VerifierFacts
from draftsmith.interfaces import (
    AlgorithmSetup,
    CheckpointFormat,
    DraftAlgorithm,
    DraftArchitecture,
    Drafter,
    DraftSlots,
    ExportContext,
    MaskRule,
    PackedRow,
    PositionLoss,
    ScoredSlots,
    VerifierWeights,
    VocabularyMap,
)
from draftsmith.testing.training import ResumeTests, StepTests

__all__ = [
    "AlgorithmCase",
    "AlgorithmTests",
    "CheckpointTests",
    "FinishTests",
    "LeakTests",
    "LearningTests",
    "Material",
    "PackingTests",
    "ReplayTests",
    "ValueTests",
    "long_material",
    "make_material",
    "pack_documents",
    "slot_logits",
    "tiny_case",
]


# --- a tiny case ------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Document:
    """One conversation's tokens [T] with their loss mask [T]."""

    token_ids: Tensor
    loss_mask: Tensor


@frozen(kw_only=True)
class Material:
    """What cases of one verifier share.

    Attributes:
        folder: the verifier.
        states: per document float32 [T, n + 1, H_t], the stream at every layer id from 0 to n.
    """

    folder: Path
    facts: VerifierFacts
    weights: VerifierWeights
    documents: tuple[Document, ...]
    states: tuple[Tensor, ...]


@frozen(kw_only=True)
class AlgorithmCase:
    """An algorithm, built, with documents to train on.

    Attributes:
        algorithm: built for float32 on the CPU.
        registered: as its plugin registers it.
        format: its checkpoint format.
        documents: each document as a packed row of its own.
        row: all of them in one row, padding at the end.
        num_steps: tokens that the trained draft may serve.
    """

    algorithm: DraftAlgorithm
    registered: Algorithm
    format: CheckpointFormat
    documents: tuple[PackedRow, ...]
    row: PackedRow
    num_steps: int


def make_material(
    folder: Path,
    family: str | Callable[..., Any] = "llama",
    *,
    seed: int = 0,
    num_layers: int = 8,
    finish: Callable[[Path], None] | None = None,
    **changes: Any,
) -> Material:
    """Write a tiny verifier to *folder* and run it over three documents: single turn, two turns, and a short one.

    Args:
        family: as of ``make_tiny_verifier``.
        finish: what else is done to the written folder before it is read, such as adding tensors to the verifier.
        changes: to the verifier's configuration.
    """
    from draftsmith.capture.engines.transformers import hidden_states, load_verifier
    from draftsmith.testing.verifiers import make_tiny_verifier
    from draftsmith.verifier import read_verifier
    from draftsmith.verifier_weights import load_verifier_weights

    make_tiny_verifier(folder, family, seed=seed, num_layers=num_layers, **changes)
    if finish is not None:
        finish(folder)
    facts = read_verifier(folder)
    documents = _documents(facts.vocab_size - 8, torch.Generator().manual_seed(seed))
    model = load_verifier(folder, dtype=torch.float32, device=torch.device("cpu"))
    ids = range(facts.num_layers + 1)
    # clone() leaves inference mode, so that gradients with respect to the states can be taken.
    states = tuple(hidden_states(model, each.token_ids[None], None, ids)[0].clone() for each in documents)
    return Material(
        folder=folder, facts=facts, weights=load_verifier_weights(facts), documents=documents, states=states
    )


def long_material(material: Material, length: int, answer: int) -> Material:
    """*material* with one document instead, of *length* tokens of which the last *answer* are supervised.

    Tokens and states are drawn at random: for windows that are wider than the other documents are long.
    """
    generator = torch.Generator().manual_seed(0)
    facts = material.facts
    document = Document(
        token_ids=torch.randint(0, facts.vocab_size - 8, (length,), generator=generator),
        loss_mask=torch.arange(length) >= length - answer,
    )
    states = torch.randn(length, facts.num_layers + 1, facts.hidden_size, generator=generator)
    return attrs.evolve(material, documents=(document,), states=(states,))


def _documents(vocabulary: int, generator: torch.Generator) -> tuple[Document, ...]:
    masks = ("....#########", "...#####...#######", "..##", ".")
    return tuple(
        Document(
            token_ids=torch.randint(0, vocabulary, (len(mask),), generator=generator),
            loss_mask=torch.tensor([each == "#" for each in mask]),
        )
        for mask in masks
    )


def tiny_case(
    material: Material,
    algorithm: str,
    *,
    options: Mapping[str, Any] | None = None,
    draft_size: int | None = None,
    attention: Literal["auto", "linear", "dense", "flex"] = "auto",
    padding: int = 3,
) -> AlgorithmCase:
    """The installed *algorithm* on *material*.

    Args:
        options: changes to the algorithm's default options.
        draft_size: tokens that the draft can propose; None: all of them.
        padding: rows of padding at the end of the packed row.

    Raises:
        UnknownNameError: no installed plugin registers the algorithm.
        AssertionError: its own ``check`` finds a problem with the options.
    """
    from draftsmith.plugins import load_plugins, load_reference

    registry = load_plugins()
    registered = registry.algorithms.get(algorithm)
    chosen = registered.options(**(options or {}))
    problems = registered.check(chosen, material.facts)
    assert not problems, [str(each) for each in problems]
    mask = load_reference(registry.masks.get(registered.mask).implementation, expected=MaskRule)
    architecture = registry.architectures.get(registered.architecture).implementation
    setup = AlgorithmSetup(
        options=chosen,
        verifier=material.facts,
        weights=material.weights,
        vocabulary=_vocabulary(material, draft_size),
        capture=registered.requirements(chosen, material.facts),
        mask=mask(window=registered.window(chosen)),
        architecture=load_reference(architecture, expected=DraftArchitecture),
        attention=attention,
        compute_dtype=torch.float32,
    )
    built = load_reference(registered.implementation, expected=DraftAlgorithm)(setup)
    format_ = load_reference(registry.schemas.get(registered.schema).implementation, expected=CheckpointFormat)()
    documents = tuple(
        _row(document, states, setup.capture.layer_ids, f"{index:032x}")
        for index, (document, states) in enumerate(zip(material.documents, material.states, strict=True))
    )
    return AlgorithmCase(
        algorithm=built,
        registered=registered,
        format=format_,
        documents=documents,
        row=pack_documents(documents, padding=padding),
        num_steps=registered.max_speculative_tokens(chosen),
    )


def _vocabulary(material: Material, draft_size: int | None) -> VocabularyMap:
    total = material.facts.vocab_size
    t2d = torch.zeros(total, dtype=torch.bool)
    if draft_size is None:
        t2d[:] = True
    else:
        # The supervised tokens first, then a scattered rest: neighbours and gaps both occur.
        used = torch.unique(torch.cat([each.token_ids[each.loss_mask] for each in material.documents]))
        rest = torch.randperm(total, generator=torch.Generator().manual_seed(1))
        order = list(dict.fromkeys([*used[::2].tolist(), *rest.tolist()]))
        t2d[torch.tensor(order[:draft_size])] = True
    kept = torch.nonzero(t2d).flatten()
    return VocabularyMap(d2t=kept - torch.arange(kept.shape[0]), t2d=t2d)


def _row(document: Document, states: Tensor, layer_ids: Sequence[int], sample_id: str) -> PackedRow:
    length = document.token_ids.shape[0]
    return PackedRow(
        input_ids=document.token_ids,
        position_ids=torch.arange(length),
        document_ids=torch.zeros(length, dtype=torch.int64),
        loss_mask=document.loss_mask,
        taps=states[:, list(layer_ids)].flatten(1),
        last_hidden=states[:, -1],
        sample_ids=(sample_id,),
    )


def pack_documents(documents: Sequence[PackedRow], *, padding: int = 0) -> PackedRow:
    """Rows of one document each, one after the other in one row, then *padding* rows of zeros."""

    def join(parts: Sequence[Tensor], fill: int = 0) -> Tensor:
        tail = parts[0].new_full((padding, *parts[0].shape[1:]), fill)
        return torch.cat([*parts, tail])

    return PackedRow(
        input_ids=join([each.input_ids for each in documents]),
        position_ids=join([each.position_ids for each in documents]),
        document_ids=join([torch.full_like(each.document_ids, i) for i, each in enumerate(documents)], -1),
        loss_mask=join([each.loss_mask for each in documents]),
        taps=join([each.taps for each in documents]),
        last_hidden=join([each.last_hidden for each in documents]),
        sample_ids=tuple(each.sample_ids[0] for each in documents),
    )


# --- what the tests compare -------------------------------------------------------------------------------------


def slot_logits(slots: DraftSlots) -> Tensor:
    """[N, V_d]: the sum of the slots' terms, unfused."""
    parts = [x.float() @ weight.float().T for x, weight in slots.terms]
    return torch.stack(parts).sum(0)


@frozen
class _Chain:
    """Slots of one chain.

    The slot of step k predicts what follows x_{bonus + k}, so that its teacher stands at row bonus + k.
    """

    begin: int  # first row of the document
    bonus: int
    slots: dict[int, int]  # step → slot


def _chains(slots: DraftSlots, row: PackedRow) -> Iterator[_Chain]:
    document_ids = row.document_ids.tolist()
    members: dict[int, dict[int, int]] = {}
    for slot, (chain, step) in enumerate(zip(slots.chain.tolist(), slots.step.tolist(), strict=True)):
        assert step not in members.setdefault(chain, {}), f"two slots of chain {chain} at step {step}"
        members[chain][step] = slot
    for chain, found in members.items():
        starts = {int(slots.teacher_row[slot]) - step for step, slot in found.items()}
        assert len(starts) == 1, f"the teacher rows of chain {chain} do not advance with the step"
        bonus = starts.pop()
        yield _Chain(document_ids.index(document_ids[bonus]), bonus, found)


def _forward(case: AlgorithmCase, model: nn.Module, row: PackedRow, seed: int = 0) -> DraftSlots:
    batch = case.algorithm.make_batch(row, torch.Generator().manual_seed(seed))
    return case.algorithm.forward(model, batch)


def _forced(case: AlgorithmCase, chain: _Chain) -> Tensor:
    """int64 [K], what the data has after the bonus token; zeros after the row's end.

    Always K of them, however many slots of the chain are supervised: vLLM drafts K tokens in every round, and a draft
    that makes them all in one pass may let each see how many there are.
    """
    given = case.row.input_ids[chain.bonus + 1 : chain.bonus + 1 + case.num_steps]
    forced = given.new_zeros(case.num_steps)
    forced[: given.shape[0]] = given
    return forced


def _propose(drafter: Drafter, row: PackedRow, chain: _Chain, num_tokens: int, forced: Tensor | None) -> Tensor:
    begin, bonus = chain.begin, chain.bonus
    return drafter.propose(row.input_ids[begin : bonus + 1], row.taps[begin:bonus], num_tokens, forced=forced)


def _keyed(slots: DraftSlots, row: PackedRow) -> dict[tuple[str, int, int], int]:
    """(document, bonus row in it, step) → slot."""
    return {
        (row.sample_ids[int(row.document_ids[chain.bonus])], chain.bonus - chain.begin, step): slot
        for chain in _chains(slots, row)
        for step, slot in chain.slots.items()
    }


def _shake(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights so large that every path through the network matters, and norms that are not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() == 1:
                    parameter.copy_(1 + 0.3 * noise)
                else:
                    parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model.eval()


def _loss(name: str) -> PositionLoss:
    from draftsmith.losses import BUILTIN_LOSSES
    from draftsmith.plugins import load_reference

    (found,) = [each for each in BUILTIN_LOSSES if each.name == name]
    loss: PositionLoss = load_reference(found.implementation, expected=PositionLoss)()
    return loss


class _CaseTests:
    """What the groups of tests share.

    Attributes:
        tolerance: of logits in float32.
        bitwise: False for a draft with experts. Which rows are multiplied together depends on all of them, and with it
            the rounding: what must not change is then compared within the tolerance. And in bfloat16 a row may go to
            other experts, where two are as good: the median slot is then close.
    """

    tolerance: float = 1e-4
    bitwise: bool = True

    @pytest.fixture
    def case(self) -> AlgorithmCase:
        """The algorithm under test."""
        raise NotImplementedError("override the fixture `case` with a tiny_case(…) of the algorithm to test")

    def draft(self, case: AlgorithmCase, seed: int = 0) -> nn.Module:
        """A draft with large random weights."""
        torch.manual_seed(seed)
        return _shake(case.algorithm.build_model(), seed)


class ReplayTests(_CaseTests):
    """Training equals serving."""

    def test_replay_matches_training(self, case: AlgorithmCase) -> None:
        """The drafter, run as vLLM runs it from every start, gives the logits of the training forward."""
        model = self.draft(case)
        slots = _forward(case, model, case.row)
        logits = slot_logits(slots).detach()
        drafter = case.algorithm.drafter(model)
        compared = 0
        for chain in _chains(slots, case.row):
            replayed = _propose(drafter, case.row, chain, case.num_steps, _forced(case, chain))
            assert replayed.shape == (case.num_steps, logits.shape[1])
            for step, slot in chain.slots.items():
                torch.testing.assert_close(replayed[step], logits[slot], rtol=0, atol=self.tolerance)
                compared += 1
        assert compared == logits.shape[0] > 0
        trained = set(slots.step.tolist())
        for seed in range(1, 50):  # an algorithm that samples its starts may not draw all steps at once
            if len(trained) == case.num_steps:
                break
            trained |= set(_forward(case, model, case.row, seed).step.tolist())
        assert trained == set(range(case.num_steps)), "some step is never trained"

    def test_drafting_does_not_depend_on_what_was_drafted_before(self, case: AlgorithmCase) -> None:
        """Caches are an optimisation: going back, jumping and resetting give what a fresh drafter gives."""
        model = self.draft(case)
        chains = list(_chains(_forward(case, model, case.row), case.row))
        used = case.algorithm.drafter(model)
        for place, chain in enumerate([*chains[::-2], *chains[::4]]):
            fresh = case.algorithm.drafter(model)
            want = _propose(fresh, case.row, chain, case.num_steps, None)
            if place % 3 == 0:
                used.reset()
            got = _propose(used, case.row, chain, case.num_steps, None)
            torch.testing.assert_close(got, want, rtol=0, atol=self.tolerance)

    @pytest.mark.parametrize("fed_back", ["drafts", "data"])
    def test_starts_side_by_side_draft_what_each_drafts_alone(self, case: AlgorithmCase, fed_back: str) -> None:
        """All starts of a document in one call, which knows tokens and features beyond most of them."""
        model, row, steps = self.draft(case), case.row, case.num_steps
        drafter, alone = case.algorithm.drafter(model), case.algorithm.drafter(model)
        chains = list(_chains(_forward(case, model, row), row))
        for begin in sorted({chain.begin for chain in chains}):
            mates = [chain for chain in chains if chain.begin == begin]
            end = max(chain.bonus for chain in mates) + 1
            ahead = torch.tensor([chain.bonus for chain in mates])[:, None] + torch.arange(1, steps + 1)
            forced = row.input_ids[ahead.clamp(max=len(row.input_ids) - 1)] if fed_back == "data" else None
            bonus = [chain.bonus - begin for chain in mates]
            got = drafter.propose_each(row.input_ids[begin:end], row.taps[begin:end], bonus, steps, forced=forced)
            assert got.shape[:2] == (len(mates), steps)
            for place, chain in enumerate(mates):
                want = _propose(alone, row, chain, steps, None if forced is None else forced[place])
                torch.testing.assert_close(got[place], want, rtol=0, atol=self.tolerance)

    def test_the_draft_feeds_back_its_own_tokens(self, case: AlgorithmCase) -> None:
        """Unforced, the drafter takes its own argmax, as a target id."""
        model = self.draft(case)
        drafter = case.algorithm.drafter(model)
        kept = case.algorithm.setup.vocabulary.kept_ids()
        for chain in _chains(_forward(case, model, case.row), case.row):
            free = _propose(drafter, case.row, chain, case.num_steps, None)
            again = _propose(drafter, case.row, chain, case.num_steps, kept[free.argmax(-1)])
            torch.testing.assert_close(again, free, rtol=0, atol=self.tolerance)


class LeakTests(_CaseTests):
    """No slot sees what it would not have in serving.

    Attributes:
        later_slots_see_the_start: False for a draft of which a window may hide the beginning of a chain, the newest
            verified token and the bonus token, from the chain's later slots.
        reads_the_bonus_token: False for a draft that proposes from the verified tokens' features alone.
    """

    later_slots_see_the_start: bool = True
    reads_the_bonus_token: bool = True

    def test_no_slot_sees_features_that_serving_does_not_have(self, case: AlgorithmCase) -> None:
        """The gradient of a slot's logits in the features is exactly zero from its bonus row on, and beyond its
        document; and not zero at the newest verified token."""
        model = self.draft(case)
        taps = case.row.taps.clone().requires_grad_(True)
        row = attrs.evolve(case.row, taps=taps)
        slots = _forward(case, model, row)
        logits = slot_logits(slots)
        direction = torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(3))
        for chain in list(_chains(slots, row))[::3]:
            for slot in chain.slots.values():
                (grad,) = torch.autograd.grad(logits[slot] @ direction, taps, retain_graph=True)
                seen = torch.nonzero(grad.abs().sum(-1)).flatten().tolist()
                assert all(chain.begin <= index < chain.bonus for index in seen), (seen, chain)
                if slot == chain.slots[0] or self.later_slots_see_the_start:
                    assert chain.bonus - 1 in seen, (seen, chain)

    def test_no_slot_sees_tokens_that_serving_does_not_have(self, case: AlgorithmCase) -> None:
        """Changing any token after the bonus token and the slot's forced prefix changes nothing."""
        model = self.draft(case)
        slots = _forward(case, model, case.row)
        logits = slot_logits(slots).detach()
        for chain in list(_chains(slots, case.row))[::3]:
            for step, slot in chain.slots.items():
                tokens = (case.row.input_ids + 1) % 300
                tokens[chain.begin : chain.bonus + step + 1] = case.row.input_ids[chain.begin : chain.bonus + step + 1]
                changed = slot_logits(_forward(case, model, attrs.evolve(case.row, input_ids=tokens)))
                tolerance = 0.0 if self.bitwise else self.tolerance
                torch.testing.assert_close(changed[slot], logits[slot], rtol=0, atol=tolerance, msg=f"{chain} {step}")

    def test_slots_depend_on_the_bonus_token(self, case: AlgorithmCase) -> None:
        """One that is meant not to read it says reads_the_bonus_token = False in its item's conformance class.

        The counterpart of the leak tests: a mask that hides everything would pass those. Of a draft that says so, the
        opposite is demanded.
        """
        model = self.draft(case)
        slots = _forward(case, model, case.row)
        logits = slot_logits(slots).detach()
        for chain in list(_chains(slots, case.row))[::3]:
            tokens = case.row.input_ids.clone()
            tokens[chain.bonus] = (tokens[chain.bonus] + 1) % 300
            changed = slot_logits(_forward(case, model, attrs.evolve(case.row, input_ids=tokens))).detach()
            wanted = chain.slots.values() if self.later_slots_see_the_start else [chain.slots[0]]
            if not self.reads_the_bonus_token:
                assert torch.equal(changed[list(wanted)], logits[list(wanted)])
                continue
            assert all((changed[slot] - logits[slot]).abs().max() > 1e-5 for slot in wanted)


class PackingTests(_CaseTests):
    """Documents of one row do not know of each other, and only the verifier's own tokens are targets."""

    def test_packing_changes_nothing(self, case: AlgorithmCase) -> None:
        """Every slot has the same logits alone, packed, and packed in another order."""
        model = self.draft(case)
        packed_slots = _forward(case, model, case.row)
        packed, keys = slot_logits(packed_slots).detach(), _keyed(packed_slots, case.row)
        others = [*case.documents, pack_documents(case.documents[::-1], padding=1)]
        compared: set[tuple[str, int, int]] = set()
        for row in others:
            slots = _forward(case, model, row)
            logits = slot_logits(slots).detach()
            for key, slot in _keyed(slots, row).items():
                if key in keys:  # an algorithm that samples its starts may draw others
                    torch.testing.assert_close(logits[slot], packed[keys[key]], rtol=0, atol=self.tolerance)
                    compared.add(key)
        assert len(compared) >= len(keys) / 2 > 0

    def test_only_what_the_verifier_wrote_is_supervised(self, case: AlgorithmCase) -> None:
        """Every target, and every token of the chain before it, is the verifier's own, in one document."""
        slots = _forward(case, self.draft(case), case.row)
        for chain in _chains(slots, case.row):
            for step in chain.slots:
                span = slice(chain.bonus, chain.bonus + step + 2)
                assert bool(case.row.loss_mask[span].all()), (chain, step)
                assert len(set(case.row.document_ids[span].tolist())) == 1, (chain, step)
                assert case.row.loss_mask[span].shape[0] == step + 2

    def test_a_row_without_targets_gives_no_slots(self, case: AlgorithmCase) -> None:
        """And still a value that can be differentiated, so that ranks stay in step."""
        row = attrs.evolve(case.row, loss_mask=torch.zeros_like(case.row.loss_mask))
        model = self.draft(case)
        for empty in (row, pack_documents([case.documents[-1]], padding=2)):
            slots = _forward(case, model, empty)
            assert slots.teacher_row.numel() == 0
            total = torch.stack([x.float().sum() for x, _ in slots.terms]).sum()
            total.backward()  # type: ignore[no-untyped-call]
            assert total.item() == 0


class ValueTests(_CaseTests):
    """Numbers: forms of attention, dtypes, what a fresh and a perfect draft score.

    Attributes:
        begins_as_a_guess: False for a draft that begins with what the verifier knows, such as layers copied from it.
    """

    begins_as_a_guess: bool = True

    def test_all_attention_forms_agree(self, case: AlgorithmCase) -> None:
        """Logits and gradients of the dense form are those of the form that is trained with."""
        model = self.draft(case)
        dense = attrs.evolve(
            case, algorithm=type(case.algorithm)(attrs.evolve(case.algorithm.setup, attention="dense"))
        )
        results = []
        for each in (case, dense):
            model.zero_grad()
            logits = slot_logits(_forward(each, model, each.row))
            logits.square().mean().backward()  # type: ignore[no-untyped-call]
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append((logits.detach(), gradients))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=self.tolerance)
        for name, gradient in results[0][1].items():
            torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-3, atol=self.tolerance)

    def test_bfloat16_is_close(self, case: AlgorithmCase) -> None:
        """The bf16 forward differs from the float32 one by rounding only; with experts, that of the median slot."""
        model = self.draft(case)
        low = attrs.evolve(
            case, algorithm=type(case.algorithm)(attrs.evolve(case.algorithm.setup, compute_dtype=torch.bfloat16))
        )
        rounded = low.algorithm.build_model().eval()
        rounded.load_state_dict(model.state_dict())
        exact = slot_logits(_forward(case, model, case.row)).detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            slots = _forward(low, rounded, case.row)
        got = slot_logits(attrs.evolve(slots, terms=[(x.float(), w.float()) for x, w in slots.terms])).detach()
        error = (got - exact).norm() / exact.norm()
        if not self.bitwise:
            error = ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median()
        assert float(error) < 0.05

    def test_a_fresh_draft_knows_nothing(self, case: AlgorithmCase) -> None:
        """One that is meant to know something says begins_as_a_guess = False in its item's conformance class.

        Of others, cross-entropy is that of a guess, and hardly anything is accepted.
        """
        from draftsmith.train.scoring import Teacher, score_slots

        torch.manual_seed(0)
        model = case.algorithm.build_model()
        setup = case.algorithm.setup
        teacher = Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32)
        with torch.no_grad():
            slots = _forward(case, model, case.row)
            scored = score_slots(slots, teacher, case.row.last_hidden, _loss("ce"))
            # A guess: the expected surprise at a token drawn without regard to the draft's logits.
            logits = slot_logits(slots)
            guess = (logits.logsumexp(-1) - logits.mean(-1)).mean()
        spread = logits.std(-1).mean()
        if not self.begins_as_a_guess:
            assert float(scored.loss.mean()) < guess + 0.5, "it begins with less than a guess"
            return
        assert abs(float(scored.loss.mean() - guess)) < 3 * float(spread) / slots.teacher_row.shape[0] ** 0.5 + 0.5
        assert float(scored.correct.float().mean()) < 0.2

    def test_the_teacher_is_its_own_perfect_draft(self, case: AlgorithmCase) -> None:
        """Given the teacher's logits, the algorithm's slots score zero loss and full acceptance of what is kept."""
        from draftsmith.train.metrics import slot_metrics
        from draftsmith.train.scoring import Teacher, score_slots

        setup = case.algorithm.setup
        teacher = Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32)
        slots = _forward(case, self.draft(case), case.row)
        logits = teacher.kept_logits(teacher.hidden(case.row.last_hidden[slots.teacher_row]))
        perfect = attrs.evolve(slots, terms=((logits, torch.eye(logits.shape[1])),))
        scored = score_slots(perfect, teacher, case.row.last_hidden, _loss("kl_div"))
        assert slots.num_steps == case.num_steps  # the metrics of every step are counted
        assert float(scored.loss.abs().max()) < 1e-4
        torch.testing.assert_close(scored.acceptance, scored.kept_mass, rtol=1e-4, atol=1e-4)
        assert torch.equal(scored.correct, scored.kept)
        if setup.vocabulary.is_identity:
            metrics = slot_metrics(slots, scored)
            for step in range(case.num_steps):
                hit, count = metrics[f"cond_acc_{step}"].tolist()
                assert hit == count > 0, step


class LearningTests(_CaseTests):
    """The draft can be trained, and nothing but the draft is.

    Attributes:
        overfit_steps, overfit_learning_rate: at most so many steps for the draft to learn the case by heart.
    """

    overfit_steps: int = 300
    overfit_learning_rate: float = 5e-3

    def test_the_draft_learns_the_case_by_heart(self, case: AlgorithmCase) -> None:
        """Overfitting one row: the first token is right at over 95 % of the starts, also when drafted as served."""
        from draftsmith.train.scoring import Teacher, score_slots
        from draftsmith.train.step import reduce_loss

        setup = case.algorithm.setup
        teacher = Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32)
        token, logsumexp = teacher.statistics(case.row.last_hidden)
        row = attrs.evolve(case.row, teacher_token=token, teacher_logsumexp=logsumexp)
        torch.manual_seed(0)
        model = case.algorithm.build_model().train()
        assert isinstance(model, DraftArchitecture)
        frozen_before = {name: tensor.clone() for name, tensor in model.shared_tensors().items()}
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], self.overfit_learning_rate)
        for _ in range(self.overfit_steps):
            slots = _forward(case, model, row)
            scored = score_slots(
                slots, teacher, row.last_hidden, _loss("kl_div"), teacher_token=token, teacher_logsumexp=logsumexp
            )
            counted = torch.ones_like(scored.kept)
            slots = attrs.evolve(slots, weight=case.algorithm.weights(slots, scored, counted))
            loss, _ = reduce_loss(scored.loss, slots, counted, case.registered.reduction)
            if bool(scored.correct[scored.kept].all()) and float(scored.loss.detach().mean()) < 0.05:
                break
            optimizer.zero_grad()
            case.algorithm.objective(slots, scored, loss)[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        first = (slots.step == 0) & scored.kept
        assert float(scored.correct[first].float().mean()) > 0.95
        self._assert_frozen(case, model, frozen_before)
        stuck = [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
        assert not stuck, f"never trained: {stuck}"
        with torch.no_grad():
            slots = _forward(case, model.eval(), row)
            scored = score_slots(slots, teacher, row.last_hidden, _loss("kl_div"))
        drafter = case.algorithm.drafter(model)
        kept = setup.vocabulary.kept_ids()
        for chain in _chains(slots, row):
            drafted = kept[_propose(drafter, row, chain, case.num_steps, None)[0].argmax()]
            assert bool(drafted == token[chain.bonus]) == bool(scored.correct[chain.slots[0]])

    def _assert_frozen(self, case: AlgorithmCase, model: nn.Module, before: Mapping[str, Tensor]) -> None:
        """Shared tensors are where they were, and every row of them is a row of the verifier's."""
        assert isinstance(model, DraftArchitecture)
        weights = case.algorithm.setup.weights
        sources = torch.cat((weights.embed_tokens, weights.lm_head)).float()
        for name, tensor in model.shared_tensors().items():
            assert torch.equal(tensor, before[name]), name
            assert not tensor.requires_grad, name
            assert name in model.state_dict(), name
            for row in tensor.float()[:: max(1, tensor.shape[0] // 16)]:
                assert bool((sources == row).all(-1).any()), f"{name} holds a row that is not the verifier's"


class FinishTests(_CaseTests):
    """The last hand on a trained draft."""

    def test_it_touches_only_the_draft(self, case: AlgorithmCase) -> None:
        """Its figures are finite, the verifier's tensors stay as they are, and without figures so do all others."""
        model = self.draft(case)
        assert isinstance(model, DraftArchitecture)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        figures = case.algorithm.finish(model, _Scored(case, model))
        assert all(math.isfinite(value) for value in figures.values()), figures
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert not changed & set(model.shared_tensors())
        assert bool(figures) >= bool(changed), f"{changed} changed, and nothing is reported"
        assert all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())

    def test_without_validation_rows_it_does_no_harm(self, case: AlgorithmCase) -> None:
        model = self.draft(case)
        logits = slot_logits(_forward(case, model, case.row)).detach()
        assert all(math.isfinite(value) for value in case.algorithm.finish(model, ()).values())
        assert torch.equal(slot_logits(_forward(case, model, case.row)).detach(), logits)


class _Scored:
    """The case's documents, scored anew on every pass, as the core hands over validation rows."""

    def __init__(self, case: AlgorithmCase, model: nn.Module) -> None:
        self.case, self.model = case, model

    def __iter__(self) -> Iterator[tuple[DraftSlots, ScoredSlots]]:
        from draftsmith.train.scoring import Teacher, score_slots

        setup = self.case.algorithm.setup
        teacher = Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32)
        for row in self.case.documents:
            with torch.no_grad():
                slots = _forward(self.case, self.model, row)
                if slots.teacher_row.numel():
                    scored = score_slots(slots, teacher, row.last_hidden, _loss("kl_div"))
            if slots.teacher_row.numel():
                yield slots, scored


class CheckpointTests(_CaseTests):
    """What is exported is all that is needed, and no more."""

    def _context(self, case: AlgorithmCase, *, include_embedding: bool = False) -> ExportContext:
        setup = case.algorithm.setup
        return ExportContext(
            setup=setup,
            verifier_name=str(setup.verifier.path),
            speculative_tokens=case.num_steps,
            include_embedding=include_embedding,
        )

    @pytest.mark.parametrize("include_embedding", [False, True])
    def test_saved_and_loaded_it_drafts_the_same(
        self, case: AlgorithmCase, tmp_path: Path, include_embedding: bool
    ) -> None:
        """From config.json, the tensors and the verifier alone, the same logits, bit by bit."""
        from safetensors.torch import load_file, save_file

        model = self.draft(case)
        context = self._context(case, include_embedding=include_embedding)
        tensors = case.format.tensors(model, context)
        save_file({name: each.clone().contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
        config = json.loads(json.dumps(case.format.config(context)))
        setup = case.algorithm.setup
        options = case.registered.options(**case.format.options(config))
        assert case.registered.max_speculative_tokens(options) == case.num_steps
        capture = case.format.capture(config, setup.verifier)
        assert capture == setup.capture
        rebuilt = type(case.algorithm)(attrs.evolve(setup, options=options, capture=capture))
        torch.manual_seed(77)
        loaded = rebuilt.build_model().eval()
        case.format.load(loaded, load_file(tmp_path / "model.safetensors"), config)
        # One batch for both: how starts are sampled is no part of a draft.
        batch = case.algorithm.make_batch(case.row, torch.Generator().manual_seed(0))
        slots = case.algorithm.forward(model, batch)
        assert torch.equal(slot_logits(rebuilt.forward(loaded, batch)), slot_logits(slots))
        for chain in list(_chains(slots, case.row))[::3]:
            want, got = (
                _propose(drafter, case.row, chain, case.num_steps, _forced(case, chain))
                for drafter in (case.algorithm.drafter(model), rebuilt.drafter(loaded))
            )
            assert torch.equal(got, want)

    def test_training_can_begin_from_it(self, case: AlgorithmCase) -> None:
        """A draft of the same options can begin from the checkpoint, with all of its weights."""
        model, context = self.draft(case), self._context(case)
        config = json.loads(json.dumps(case.format.config(context)))
        setup = case.algorithm.setup
        assert not list(case.format.warm_start_problems(config, setup.options, setup.verifier))
        torch.manual_seed(77)
        begun = case.algorithm.build_model().eval()
        assert list(case.format.warm_start(begun, case.format.tensors(model, context), config)) == []
        want, got = (slot_logits(_forward(case, each, case.row)).detach() for each in (model, begun))
        assert torch.equal(got, want)

    def test_the_checkpoint_holds_what_it_must_and_nothing_else(self, case: AlgorithmCase) -> None:
        from draftsmith.interfaces import TensorSpec

        context = self._context(case)
        config = json.loads(json.dumps(case.format.config(context)))
        tensors = case.format.tensors(self.draft(case), context)
        expected = case.format.expected_tensors(config)
        assert set(tensors) <= set(expected)
        assert {name for name, spec in expected.items() if spec.required} <= set(tensors)
        names = {torch.int64: "I64", torch.bool: "BOOL", torch.float32: "BF16"}
        present = {}
        for name, tensor in tensors.items():
            spec = expected[name]
            assert tuple(tensor.shape) == spec.shape, name
            if not tensor.is_floating_point():
                assert names[tensor.dtype] == spec.dtype, name
            present[name] = TensorSpec(shape=tuple(tensor.shape), dtype=names.get(tensor.dtype, "BF16"))
        assert not list(case.format.lint(config, present, case.algorithm.setup.verifier))
        plan = case.format.serving(config)
        assert plan.num_speculative_tokens == case.num_steps
        declared = case.registered.vllm_methods
        assert not declared or plan.method in declared, f"served by {plan.method!r}, and vllm_methods says {declared}"


class AlgorithmTests(
    ReplayTests,
    LeakTests,
    PackingTests,
    ValueTests,
    LearningTests,
    FinishTests,
    CheckpointTests,
    StepTests,
    ResumeTests,
):
    """What every algorithm must satisfy. Override the fixture ``case``.

    The groups are classes of their own, so that a long list of variants can be put to some of them only.
    """
