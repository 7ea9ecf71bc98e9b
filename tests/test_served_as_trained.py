"""EAGLE-3 drafts of every kind in a real vLLM: it accepts what the simulator says, position by position.

A draft that is never right is never accepted, however wrongly it is served. So each draft here has learnt a tiny
verifier's own answers, and vLLM answers the same prompts with it. All engines run one after another in one child.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from draftsmith.capture.engines.transformers import hidden_states, load_verifier
from draftsmith.checkpoint.export import EXPORT_DTYPE, write_export
from draftsmith.checkpoint.exported import load_draft, open_format, read_config
from draftsmith.config.schema import TrainConfig
from draftsmith.interfaces import DraftAlgorithm, ExportContext
from draftsmith.plugins import load_plugins, load_reference
from draftsmith.serving.simulator import answer_length, simulate
from draftsmith.serving.verifier_model import generate_greedily
from draftsmith.serving.vllm_process import DraftCounters, EngineRequest, EngineResult, run_engines
from draftsmith.testing.algorithm import AlgorithmCase, Document, Material, tiny_case
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith.train.metrics import divide
from draftsmith.train.optimizers import build_optimizers
from draftsmith.train.scoring import Teacher
from draftsmith.train.setup import build_draft
from draftsmith.train.step import Objective, train_step
from draftsmith.verifier import read_verifier
from draftsmith.verifier_weights import load_verifier_weights

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROMPTS, ANSWER, BEYOND = 16, 32, 5
#: Two float32 logits this close may change places with the kernel that computes them.
TIE = 1e-4

NORMS: Mapping[str, Mapping[str, bool]] = {
    "no_norm": {"norm_before_fc": False, "fc_norm": False},
    "one_norm": {"norm_before_fc": True, "fc_norm": False},
    "norm_per_tap": {"norm_before_fc": False, "fc_norm": True},
}
TAPS: Mapping[int, tuple[int, ...] | None] = {2: (1, 6), 3: None, 5: (1, 2, 4, 6, 7)}
WINDOW = 6  # of answers that begin at 4 to 15 tokens and end 32 later


@frozen
class Kind:
    """A kind of draft, and what it is served with.

    Attributes:
        taps: number of tapped layers.
        residual, output: norm_before_residual, norm_output.
        vocabulary: ``full``, or ``kept``: 256 of the verifier's 320 tokens.
        served: ``as_model`` (`vllm serve CHECKPOINT`) or ``beside`` the verifier, by speculative_config.
    """

    verifier: str
    layer_type: str
    norms: str
    taps: int
    residual: bool
    output: bool
    layers: int
    window: int | None
    vocabulary: str
    served: str

    def __str__(self) -> str:
        names = [self.layer_type, self.norms, f"{self.taps}_taps", f"{self.layers}_layers", self.vocabulary]
        flags = {"residual": self.residual, "output": self.output, "window": self.window}
        return "-".join([*names, *(name for name, on in flags.items() if on)])

    @property
    def options(self) -> dict[str, Any]:
        return {
            # A window moves with the step: more steps, more to go wrong.
            "ttt_steps": 3 if self.window is None else BEYOND,
            "layer_type": self.layer_type,
            **NORMS[self.norms],
            "norm_before_residual": self.residual,
            "norm_output": self.output,
            "num_layers": self.layers,
            "layer_ids": TAPS[self.taps],
            "sliding_window": self.window,
        }


DEFAULT = Kind("llama3_rope", "llama", "one_norm", 3, True, True, 1, None, "full", "beside")
#: The fewest drafts among which any two values of different columns meet.
KINDS = (
    Kind("qwen3_yarn", "llama", "no_norm", 5, False, False, 2, WINDOW, "full", "beside"),
    Kind("llama3_rope", "llama", "norm_per_tap", 5, True, True, 2, None, "full", "as_model"),
    Kind("qwen3_yarn", "qwen3", "no_norm", 3, True, True, 1, None, "full", "as_model"),
    Kind("qwen3_yarn", "qwen3", "norm_per_tap", 2, False, True, 2, None, "kept", "beside"),
    Kind("qwen3_yarn", "qwen3", "one_norm", 3, False, False, 2, WINDOW, "kept", "beside"),
    Kind("llama3_rope", "llama", "norm_per_tap", 3, False, False, 1, WINDOW, "kept", "beside"),
    Kind("llama3_rope", "llama", "no_norm", 2, True, False, 2, WINDOW, "kept", "as_model"),
    Kind("llama3_rope", "llama", "one_norm", 2, False, True, 1, WINDOW, "full", "as_model"),
    Kind("llama3_rope", "qwen3", "one_norm", 5, True, False, 1, None, "kept", "beside"),
)

ENGINE = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}


# --- a verifier, its answers, and drafts that know them ---------------------------------------------------------


@frozen(kw_only=True)
class Answered:
    """A verifier with prompts and its greedy answers to them, which are the documents that drafts learn.

    Attributes:
        answers: ANSWER + BEYOND tokens each.
    """

    material: Material
    prompts: tuple[list[int], ...]
    answers: tuple[list[int], ...]


def answered(folder: Path, family: str) -> Answered:
    """Prompts whose answers have something to be learnt, and no near tie where kernels might choose otherwise."""
    # A tied one repeats its input. Stored like an export, it has the same values in the verifier and in checkpoints.
    make_tiny_verifier(folder, family, tied=False, dtype="bfloat16")
    facts = read_verifier(folder)
    model = load_verifier(folder, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 16, (8 * PROMPTS,), generator=generator).tolist()
    drawn = [torch.randint(4, facts.vocab_size - 8, (each,), generator=generator).tolist() for each in lengths]
    pairs = [
        (prompt, answer)
        for prompt, answer in zip(drawn, generate_greedily(model, drawn, ANSWER, BEYOND, ()), strict=True)
        if len(set(answer)) >= 12 and closest_call(model, prompt, answer) > 10 * TIE
    ][:PROMPTS]
    assert len(pairs) == PROMPTS
    tokens = [torch.tensor([*prompt, *answer]) for prompt, answer in pairs]
    documents = tuple(
        Document(token_ids=each, loss_mask=torch.arange(len(each)) >= len(prompt))
        for each, (prompt, _) in zip(tokens, pairs, strict=True)
    )
    ids = range(facts.num_layers + 1)
    states = tuple(hidden_states(model, each[None], None, ids)[0].clone() for each in tokens)
    return Answered(
        material=Material(
            folder=folder, facts=facts, weights=load_verifier_weights(facts), documents=documents, states=states
        ),
        prompts=tuple(prompt for prompt, _ in pairs),
        answers=tuple(answer for _, answer in pairs),
    )


@torch.inference_mode()
def closest_call(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Smallest gap between the best two logits from which a token of the answer was chosen."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return float(logits.float().topk(2).values.diff(dim=-1).abs().min())


def learn(case: AlgorithmCase, right: float, at_most: int = 200) -> tuple[torch.nn.Module, dict[str, float]]:
    """Train on the documents until the first token is right at this share of the starts; the last step's metrics.

    By cross-entropy with the verifier's choice: a random verifier's second best tokens are as hard to learn as its
    best, and are not what greedy answers are made of. Norms begin away from one, where leaving one out would not show.
    """
    setup = case.algorithm.setup
    draft = build_draft(case.algorithm, torch.device("cpu"), 0).train()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.requires_grad and parameter.dim() == 1:
                parameter.mul_(1 + 0.5 * torch.randn(parameter.shape))
    objective = Objective(
        algorithm=case.algorithm,
        model=draft,
        teacher=Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32),
        loss=load_reference(load_plugins().losses.get("ce").implementation)(),
        reduction=case.registered.reduction,
        out_of_vocabulary="renormalise",
        compute_dtype=torch.float32,
    )
    optimizers = build_optimizers(draft, TrainConfig(learning_rate=0.01), set())
    metrics: dict[str, float] = {}
    for step in range(at_most):
        optimizers.set_rate(min(1.0, (step + 1) / 10))
        generator = torch.Generator().manual_seed(step)
        metrics = divide(train_step(objective, optimizers, [case.row], [generator], clip_norm=1.0).pairs)
        if metrics["position_0_acc"] > right:
            break
    with torch.no_grad():  # as an export stores it, so that the trained draft itself is what must be served
        for parameter in draft.parameters():
            parameter.copy_(parameter.to(EXPORT_DTYPE))
    return draft.eval(), metrics


def export(folder: Path, case: AlgorithmCase, draft: torch.nn.Module) -> Path:
    setup = case.algorithm.setup
    context = ExportContext(setup=setup, verifier_name=str(setup.verifier.path), speculative_tokens=case.num_steps)
    write_export(folder, case.format, draft, context, {"algorithm": case.registered.name})
    return folder


@frozen(kw_only=True)
class Counted:
    """What the simulator counts for one prompt.

    Attributes:
        closest: smallest gap between the best two logits from which the draft chose a token.
    """

    counters: DraftCounters
    closest: float


@torch.no_grad()
def simulated(algorithm: DraftAlgorithm, model: torch.nn.Module, told: Answered) -> list[Counted]:
    """The draft in the simulator, prompt by prompt."""
    steps, layer_ids = algorithm.options.ttt_steps, list(algorithm.setup.capture.layer_ids)
    found = []
    for index in range(PROMPTS):
        tokens = told.material.documents[index].token_ids
        taps = told.material.states[index][:, layer_ids].flatten(1)
        begin, eos = len(told.prompts[index]), told.material.facts.eos_token_ids
        simulation = simulate(algorithm, model, tokens, taps, begin, steps, eos_token_ids=eos, max_tokens=ANSWER)
        assert simulation.complete
        starts = [each.start for each in simulation.rounds]
        best = algorithm.drafter(model).propose_each(tokens, taps, starts, steps).topk(2).values
        found.append(Counted(counters=simulation.counters, closest=float((best[..., 0] - best[..., 1]).min())))
    return found


# --- the same in vLLM -------------------------------------------------------------------------------------------


def alone(family: str, told: Answered) -> EngineRequest:
    sampling = {"temperature": 0.0, "max_tokens": ANSWER + BEYOND, "ignore_eos": True}
    return EngineRequest(
        name=family, engine={"model": str(told.material.folder), **ENGINE}, prompts=told.prompts, sampling=sampling
    )


def with_draft(name: str, told: Answered, checkpoint: Path, served: str) -> EngineRequest:
    """Every prompt is a group, so that each is counted by itself."""
    engine: dict[str, Any] = {"model": str(checkpoint), **ENGINE}
    if served == "beside":
        plan = open_format(load_plugins().schemas.get("eagle3")).serving(read_config(checkpoint))
        engine["model"] = str(told.material.folder)
        engine["speculative_config"] = {
            "method": plan.method,
            "model": str(checkpoint),
            "num_speculative_tokens": plan.num_speculative_tokens,
        }
    return EngineRequest(
        name=name,
        engine=engine,
        prompts=told.prompts,
        sampling={"temperature": 0.0, "max_tokens": ANSWER},
        groups=[f"{index}" for index in range(PROMPTS)],
    )


@frozen(kw_only=True)
class Trained:
    """A draft and its export.

    Attributes:
        algorithm, model: as trained, not as read from the checkpoint.
        metrics: of the last training step.
    """

    told: Answered
    algorithm: DraftAlgorithm
    model: torch.nn.Module
    checkpoint: Path
    metrics: Mapping[str, float]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Products this small gain nothing from threads, and the same ones give the same drafts everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def verifiers(folder) -> dict[str, Answered]:
    return {family: answered(folder / family, family) for family in ("llama3_rope", "qwen3_yarn")}


@pytest.fixture(scope="module")
def trained(folder, verifiers) -> dict[Kind, Trained]:
    """The default kind learns its documents by heart; the others are right often, and wrong often."""
    drafts = {}
    for kind in (DEFAULT, *KINDS):
        told = verifiers[kind.verifier]
        size = 256 if kind.vocabulary == "kept" else None
        case = tiny_case(told.material, "eagle3", options=kind.options, draft_size=size)
        model, metrics = learn(case, 0.97 if kind is DEFAULT else 0.6)
        checkpoint = export(folder / str(kind), case, model)
        drafts[kind] = Trained(
            told=told, algorithm=case.algorithm, model=model, checkpoint=checkpoint, metrics=metrics
        )
    return drafts


@pytest.fixture(scope="module")
def lost(folder, trained) -> Path:
    """The default kind's checkpoint with a flag that is not what was trained."""
    return altered(trained[DEFAULT].checkpoint, folder / "lost", norm_before_residual=not DEFAULT.residual)


@pytest.fixture(scope="module")
def served(folder, verifiers, trained, lost) -> dict[str, EngineResult]:
    """What vLLM answers: the verifiers alone, with every kind of draft, and with the lost flag."""
    requests = [alone(family, told) for family, told in verifiers.items()]
    requests += [with_draft(str(kind), each.told, each.checkpoint, kind.served) for kind, each in trained.items()]
    requests.append(with_draft("lost", trained[DEFAULT].told, lost, DEFAULT.served))
    return run_engines(requests, folder / "vllm")


def altered(checkpoint: Path, folder: Path, *, layers: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in its config, its layers' among them."""
    shutil.copytree(checkpoint, folder)
    config = read_config(folder) | changes
    config["transformer_layer_config"] |= layers or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- what must hold ---------------------------------------------------------------------------------------------


def test_any_two_values_of_the_options_are_served_together():
    columns = [[getattr(kind, name) for kind in KINDS] for name in Kind.__annotations__]
    for first, second in itertools.combinations(columns, 2):
        assert len(set(zip(first, second, strict=True))) == len(set(first)) * len(set(second))


every_kind = pytest.mark.parametrize("kind", [DEFAULT, *KINDS], ids=str)


@every_kind
def test_vllm_accepts_what_the_simulator_says(trained, served, kind):
    """Prompt by prompt and position by position, exactly, wherever the draft's choices are no ties."""
    draft, result = trained[kind], served[str(kind)]
    rates = result.counters.acceptance_per_position
    assert rates[0] >= 0.3, "a draft that is seldom right shows nothing"
    assert rates[-1] > 0
    assert_same_counts(result, simulated(draft.algorithm, draft.model, draft.told))


def assert_same_counts(result: EngineResult, expected: Sequence[Counted]) -> None:
    clear = {index: each.counters for index, each in enumerate(expected) if each.closest > TIE}
    assert len(clear) >= 0.75 * PROMPTS
    assert {index: result.counters_by_group[f"{index}"] for index in clear} == clear


@every_kind
def test_the_output_is_that_of_the_verifier_alone(trained, served, kind):
    by_itself = served[kind.verifier]
    assert [list(each) for each in by_itself.outputs] == list(trained[kind].told.answers)
    ends = [answer_length(each, by_itself.eos_token_ids, ANSWER) for each in by_itself.outputs]
    expected = [each[:end] for each, end in zip(by_itself.outputs, ends, strict=True)]
    assert list(served[str(kind)].outputs) == expected


@every_kind
def test_another_value_of_an_option_would_show(trained, served, kind, tmp_path):
    """With the same tensors and any of these options changed, the simulator no longer says what vLLM counted."""
    checkpoint = trained[kind].checkpoint
    size = None if kind.window else WINDOW
    types = ["full_attention" if size is None else "sliding_attention"] * kind.layers
    first, *rest = read_config(checkpoint)["eagle_aux_hidden_state_layer_ids"]
    others = {
        "taps": altered(checkpoint, tmp_path / "taps", eagle_aux_hidden_state_layer_ids=[first - 1, *rest]),
        "residual": altered(checkpoint, tmp_path / "residual", norm_before_residual=not kind.residual),
        "output": altered(checkpoint, tmp_path / "output", norm_output=not kind.output),
        "window": altered(checkpoint, tmp_path / "window", layers={"sliding_window": size, "layer_types": types}),
    }
    for name, other in others.items():
        algorithm, model, _ = load_draft(other, load_plugins())
        counted = [each.counters for each in simulated(algorithm, model, trained[kind].told)]
        assert counted != [served[str(kind)].counters_by_group[f"{index}"] for index in range(PROMPTS)], name


def test_a_lost_flag_costs_acceptance_and_no_token(trained, served, lost):
    """vLLM follows config.json, and so does the simulator: this is what a flag written wrongly would do unseen."""
    right, wrong = served[str(DEFAULT)], served["lost"]
    assert wrong.outputs == right.outputs
    assert wrong.counters.acceptance_length < 0.9 * right.counters.acceptance_length
    algorithm, model, _ = load_draft(lost, load_plugins())
    assert_same_counts(wrong, simulated(algorithm, model, trained[DEFAULT].told))


def test_what_is_learnt_by_heart_is_accepted(trained, served):
    """The length that vLLM gains on the documents of the training is the one that training reported."""
    metrics, counters = trained[DEFAULT].metrics, served[str(DEFAULT)].counters
    assert metrics["position_0_acc"] > 0.95
    assert counters.acceptance_per_position[0] > 0.95
    assert counters.acceptance_length == pytest.approx(metrics["eal"], rel=0.05)
