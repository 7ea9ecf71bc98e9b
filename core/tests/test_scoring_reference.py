"""The fused projection equals a plain, dense autograd computation: values, metrics, and every gradient."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.interfaces import DraftSlots, PositionLoss, ScoredSlots, TeacherChunk, VerifierWeights, VocabularyMap
from draftsmith.losses.divergence import CrossEntropy, ForwardKL, JensenShannon, ReverseKL
from draftsmith.losses.overlap import Hybrid, NegativeLogAcceptance, TotalVariation
from draftsmith.losses.weighted import WeightedSum
from draftsmith.train import scoring
from draftsmith.train.scoring import Teacher, score_slots

V_T, V_D, H_T, ROWS = 97, 31, 12, 40

LOSSES: dict[str, PositionLoss] = {
    "kl_div": ForwardKL(),
    "ce": CrossEntropy(),
    "rkl": ReverseKL(),
    "jsd": JensenShannon(),
    "tv": TotalVariation(),
    "nla": NegativeLogAcceptance(),
    "lk_hybrid": Hybrid(),
    "sum": WeightedSum({"ce": 0.1, "tv": 0.9}, [CrossEntropy(), TotalVariation()]),
}


class Scaled(PositionLoss):
    """Somebody's loss that writes the value alone and, unlike the built-in ones, minds a shift of the logits."""

    def value(self, logits: Tensor, teacher: TeacherChunk) -> Tensor:
        cross = -(teacher.log_p.exp() * torch.log_softmax(logits, -1)).sum(-1)
        return teacher.kept_mass * cross + 0.01 * logits.logsumexp(-1).square()


@attrs.frozen
class Case:
    teacher: Teacher
    weights: VerifierWeights
    vocabulary: VocabularyMap
    last_hidden: Tensor
    slots: DraftSlots

    def score(self, loss: PositionLoss, statistics: bool = True, expected: Tensor | None = None) -> ScoredSlots:
        token, logsumexp = self.teacher.statistics(self.last_hidden) if statistics else (None, None)
        return score_slots(
            self.slots, self.teacher, self.last_hidden, loss,
            teacher_token=token, teacher_logsumexp=logsumexp, expected=expected,
        )  # fmt: skip


def make_case(
    *,
    full: bool = False,
    trainable: bool = False,
    terms: int = 1,
    softcap: float | None = None,
    scale: float = 1.0,
    slots: int = 90,
) -> Case:
    generator = torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    kept = torch.arange(V_T) if full else torch.randperm(V_T, generator=generator)[:V_D].sort().values
    mask = torch.zeros(V_T, dtype=torch.bool)
    mask[kept] = True
    vocabulary = VocabularyMap(d2t=kept - torch.arange(kept.numel()), t2d=mask)
    norm = nn.RMSNorm(H_T, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * draw(H_T))
    weights = VerifierWeights(
        embed_tokens=draw(V_T, H_T),
        lm_head=draw(V_T, H_T),
        final_norm=norm,
        logit_softcap=softcap,
        logit_scale=scale,
    )
    # The first term is the head, of the verifier's width; a further one is of low rank.
    pairs = []
    for term in range(terms):
        width = H_T if term == 0 else 3
        head = weights.lm_head[kept].clone() if term == 0 else draw(kept.numel(), width)
        pairs.append((draw(slots, width).requires_grad_(True), head.requires_grad_(trainable)))
    draft_slots = DraftSlots(
        terms=pairs,
        teacher_row=torch.randint(0, ROWS - 5, (slots,), generator=generator),
        step=torch.zeros(slots, dtype=torch.int64),
        chain=torch.arange(slots),
        weight=torch.ones(slots),
        total_positions=slots,
        num_steps=3,
    )
    teacher = Teacher(weights, vocabulary, device="cpu", compute_dtype=torch.float32)
    return Case(teacher, weights, vocabulary, draw(ROWS, H_T), draft_slots)


def teacher_logits(case: Case) -> Tensor:
    """float32 [N, V_t] at every slot, as the verifier computes them."""
    with torch.no_grad():
        logits = case.weights.logit_scale * (case.weights.final_norm(case.last_hidden) @ case.weights.lm_head.T)
        if case.weights.logit_softcap is not None:
            logits = case.weights.logit_softcap * torch.tanh(logits / case.weights.logit_softcap)
    return logits[case.slots.teacher_row]


def reference(case: Case, loss: PositionLoss) -> ScoredSlots:
    kept = case.vocabulary.kept_ids()
    full = teacher_logits(case)
    p_full = full.softmax(-1)
    kept_mass = p_full[:, kept].sum(-1)
    log_p = full[:, kept].log_softmax(-1)
    logits = sum(x @ weight.T for x, weight in case.slots.terms)
    assert isinstance(logits, Tensor)
    q = torch.zeros_like(full)
    q[:, kept] = logits.detach().softmax(-1)
    best = full.argmax(-1)
    return ScoredSlots(
        loss=loss.value(logits, TeacherChunk(log_p, kept_mass, log_p.argmax(-1))),
        correct=kept[logits.argmax(-1)] == best,
        acceptance=torch.minimum(p_full, q).sum(-1),
        kept_mass=kept_mass,
        kept=case.vocabulary.t2d[best],
        top_probability=logits.detach().softmax(-1).gather(-1, log_p.argmax(-1, keepdim=True)).squeeze(-1),
    )


def compare(case: Case, loss: PositionLoss, *, statistics: bool = True, tolerance: float = 2e-5) -> None:
    scored, expected = case.score(loss, statistics), reference(case, loss)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(scored.loss, expected.loss, **close)
    torch.testing.assert_close(scored.acceptance, expected.acceptance, **close)
    torch.testing.assert_close(scored.kept_mass, expected.kept_mass, **close)
    assert torch.equal(scored.correct, expected.correct)
    assert torch.equal(scored.kept, expected.kept)
    torch.testing.assert_close(scored.top_probability, expected.top_probability, **close)
    for metric in (scored.acceptance, scored.kept_mass, scored.top_probability):
        assert not metric.requires_grad
    direction = torch.randn(scored.loss.shape, generator=torch.Generator().manual_seed(2))
    leaves = [each for pair in case.slots.terms for each in pair if each.requires_grad]
    gradients = torch.autograd.grad((scored.loss * direction).sum(), leaves)
    references = torch.autograd.grad((expected.loss * direction).sum(), leaves)
    for gradient, wanted in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, wanted, **close)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, and several pieces in each, although the cases are tiny."""
    monkeypatch.setattr(scoring, "MINIMUM_ROWS", 1)
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", {"cpu": 9 * V_D, "accelerator": 9 * V_D})
    monkeypatch.setattr(scoring, "PIECE_ELEMENTS", 4 * V_D)
    monkeypatch.setattr(scoring, "STATISTICS_BLOCK", 20)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_dense_computation(name: str, full: bool, trainable: bool) -> None:
    compare(make_case(full=full, trainable=trainable), LOSSES[name])


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
def test_somebody_elses_loss(full: bool, trainable: bool) -> None:
    compare(make_case(full=full, trainable=trainable), Scaled())


@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
def test_without_statistics_from_capture(full: bool) -> None:
    compare(make_case(full=full), ForwardKL(), statistics=False)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_several_terms(trainable: bool) -> None:
    compare(make_case(terms=2, trainable=trainable), ForwardKL())


def test_one_trainable_term_beside_a_frozen_head() -> None:
    case = make_case(terms=2, trainable=True)
    case.slots.terms[0][1].requires_grad_(False)
    compare(case, Hybrid())


@pytest.mark.parametrize("guess", ["right", "wrong", "zero", "none"])
@pytest.mark.parametrize("frozen_head", [False, True])
def test_a_right_guess_of_the_weights_saves_the_second_pass(
    guess: str, frozen_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a wrong one costs it: the gradients are the same either way, also when they are taken twice."""
    case = make_case(terms=2, trainable=True)
    case.slots.terms[0][1].requires_grad_(not frozen_head)
    weight = torch.rand(case.slots.teacher_row.shape, generator=torch.Generator().manual_seed(5))
    guesses = {"right": 3.0 * weight, "wrong": weight.flip(0), "zero": 0.0 * weight, "none": None}
    walks: list[int] = []
    walk = scoring._Scorer.walk
    monkeypatch.setattr(scoring._Scorer, "walk", lambda *a, **k: (walks.append(1), walk(*a, **k))[1])
    leaves = [each for pair in case.slots.terms for each in pair if each.requires_grad]
    references = torch.autograd.grad((reference(case, Hybrid()).loss * weight).sum() / 7, leaves)
    scored = case.score(Hybrid(), expected=guesses[guess])
    for _ in range(2):
        gradients = torch.autograd.grad((scored.loss * weight).sum() / 7, leaves, retain_graph=True)
        for gradient, wanted in zip(gradients, references, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=2e-5, atol=2e-5)
    assert len(walks) == (1 if guess == "right" else 3)


@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
def test_soft_cap_and_scale(full: bool) -> None:
    compare(make_case(full=full, softcap=3.0, scale=0.7), ForwardKL())


def test_statistics_are_those_of_the_full_vocabulary() -> None:
    case = make_case(softcap=5.0)
    token, logsumexp = case.teacher.statistics(case.last_hidden)
    logits = 5.0 * torch.tanh(case.weights.final_norm(case.last_hidden) @ case.weights.lm_head.T / 5.0)
    assert torch.equal(token, logits.argmax(-1))
    torch.testing.assert_close(logsumexp, logits.logsumexp(-1))


@pytest.mark.parametrize("loss", [ForwardKL(), TotalVariation(), JensenShannon()])
def test_a_draft_that_is_its_teacher(loss: PositionLoss) -> None:
    case = make_case(full=True)
    x = case.weights.final_norm(case.last_hidden)[case.slots.teacher_row].detach().requires_grad_(True)
    case = attrs.evolve(case, slots=attrs.evolve(case.slots, terms=[(x, case.weights.lm_head)]))
    scored = case.score(loss)
    torch.testing.assert_close(scored.loss, torch.zeros_like(scored.loss), rtol=0, atol=2e-6)
    torch.testing.assert_close(scored.acceptance, torch.ones_like(scored.acceptance))
    assert scored.correct.all()
    assert scored.kept.all()


def test_tokens_outside_the_draft_vocabulary_are_never_correct() -> None:
    scored = make_case().score(ForwardKL())
    assert not scored.kept.all()
    assert not (scored.correct & ~scored.kept).any()
    assert (scored.acceptance <= scored.kept_mass + 1e-6).all()


def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()

    def run() -> tuple[ScoredSlots, Tensor]:
        scored = case.score(Hybrid())
        return scored, torch.autograd.grad(scored.loss.sum(), case.slots.terms[0][0])[0]

    chunked, chunked_gradient = run()
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", {"cpu": 2**20, "accelerator": 2**20})
    monkeypatch.setattr(scoring, "PIECE_ELEMENTS", 2**20)
    whole, whole_gradient = run()
    torch.testing.assert_close(chunked.loss, whole.loss)
    torch.testing.assert_close(chunked_gradient, whole_gradient)
    assert torch.equal(chunked.correct, whole.correct)


@pytest.mark.parametrize("trainable", [False, True], ids=["frozen", "trainable"])
def test_no_slots_give_an_empty_loss_that_still_has_a_graph(trainable: bool) -> None:
    case = make_case(slots=0, trainable=trainable)
    scored = case.score(ForwardKL())
    assert scored.loss.shape == (0,)
    scored.loss.sum().backward()
    gradient = case.slots.terms[0][0].grad
    assert gradient is not None
    assert gradient.shape == (0, H_T)


def test_no_gradient_is_computed_when_none_is_wanted() -> None:
    case = make_case()

    class NoGradient(ForwardKL):
        def with_gradient(self, draft: object, teacher: object) -> tuple[Tensor, Tensor]:
            raise AssertionError("a gradient nobody asked for")

    with torch.no_grad():
        scored = case.score(NoGradient())
    torch.testing.assert_close(scored.loss, reference(case, ForwardKL()).loss.detach(), rtol=1e-5, atol=1e-5)


def test_the_output_is_freed_with_its_last_reference() -> None:
    import gc
    import weakref

    case = make_case()
    gc.disable()
    try:
        scored = case.score(ForwardKL())
        alive = weakref.ref(scored.loss)
        del scored
        assert alive() is None, "a reference cycle would keep every step's gradients until the next collection"
    finally:
        gc.enable()


@pytest.mark.parametrize("terms", [1, 2])
def test_bfloat16_products_keep_a_float32_loss(terms: int) -> None:
    case = make_case(terms=terms)
    teacher = Teacher(case.weights, case.vocabulary, device="cpu", compute_dtype=torch.bfloat16)
    half = attrs.evolve(case, teacher=teacher)
    expected, scored = reference(case, ForwardKL()), half.score(ForwardKL())
    assert scored.loss.dtype == torch.float32
    assert (scored.loss - expected.loss).abs().mean() < 0.03 * expected.loss.abs().mean()
    gradient = torch.autograd.grad(scored.loss.sum(), case.slots.terms[0][0])[0]
    wanted = torch.autograd.grad(expected.loss.sum(), case.slots.terms[0][0])[0]
    assert gradient.dtype == torch.float32
    assert (gradient - wanted).norm() < 0.05 * wanted.norm()


def test_an_enclosing_autocast_changes_nothing() -> None:
    case = make_case()
    plain = case.score(ForwardKL()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = case.score(ForwardKL()).loss
    assert torch.equal(plain, inside)


def test_statistics_come_together() -> None:
    case = make_case()
    token, _ = case.teacher.statistics(case.last_hidden)
    with pytest.raises(ValueError, match="together"):
        score_slots(case.slots, case.teacher, case.last_hidden, ForwardKL(), teacher_token=token)


class _Widest(TorchDispatchMode):
    """The most rows of any [rows, vocabulary] matrix that torch makes; heads, [vocabulary, width], are not meant."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, Tensor) and each.dim() == 2 and each.shape[1] in (V_D, V_T) and each.shape[0] != H_T:
                self.rows = max(self.rows, each.shape[0])
        return made


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("loss", ["kl_div", "sum"])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_no_matrix_of_tokens_and_vocabulary_is_made(full: bool, statistics: bool, loss: str, trainable: bool) -> None:
    """Forward and backward, teacher and draft: a chunk at a time, however many slots there are."""
    case = make_case(full=full, trainable=trainable)
    known = case.teacher.statistics(case.last_hidden)
    with _Widest() as widest:
        token, logsumexp = known if statistics else (None, None)
        scored = score_slots(
            case.slots, case.teacher, case.last_hidden, LOSSES[loss], teacher_token=token, teacher_logsumexp=logsumexp
        )
        scored.loss.sum().backward()
    assert case.slots.teacher_row.unique().numel() > 20
    assert 0 < widest.rows <= 9


def test_in_validation_a_tie_goes_to_the_first_token_as_in_vllm() -> None:
    """Two tokens with one head row between them: the draft proposes the lower one, and only that one is right."""
    case = make_case(full=True)
    (x, head), best = case.slots.terms[0], teacher_logits(case).argmax(-1)
    tied = head.detach().clone()
    tied[0] = tied[best[0]] = 5.0 * x.detach()[0]
    slots = attrs.evolve(case.slots, terms=[(x, tied)])
    assert best[0] > 0
    with torch.no_grad():
        assert not score_slots(slots, case.teacher, case.last_hidden, LOSSES["kl_div"]).correct[0]
    assert score_slots(slots, case.teacher, case.last_hidden, LOSSES["kl_div"]).correct[0]
