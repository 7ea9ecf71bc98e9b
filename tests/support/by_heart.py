"""Drafts that know a tiny verifier's greedy answers by heart, served by a real vLLM.

Random prompts, the verifier's own greedy answers, a draft trained on nothing else until it is often right; so that a
vLLM accepts at every position, and counts can be compared. Several drafts share one vLLM process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attrs import frozen
from runner_v2 import v2_environment
from torch import nn

from draftsmith.api import Algorithm, VerifierFacts
from draftsmith.capture.engines.transformers import load_verifier
from draftsmith.checkpoint.card import speculative_config
from draftsmith.checkpoint.exported import load_draft, open_format, schema_for
from draftsmith.config.schema import TrainConfig
from draftsmith.interfaces import DraftAlgorithm, PackedRow
from draftsmith.plugins.manager import PluginRegistry
from draftsmith.serving.simulator import Simulation, simulate
from draftsmith.serving.verifier_model import features, generate_greedily
from draftsmith.serving.vllm_process import DraftCounters, EngineRequest, required_environment, run_engines
from draftsmith.testing.algorithm import pack_documents
from draftsmith.train.optimizers import build_optimizers
from draftsmith.train.scoring import Teacher
from draftsmith.train.setup import build_loss
from draftsmith.train.step import Objective, train_step
from draftsmith.verifier import read_verifier

#: Lengths of the prompts: shorter than a block, and longer than several windows.
LENGTHS = (3, 9, 14, 20, 27, 35, 44, 60)
#: Tokens of an answer; and how many more are known, for what is accepted beyond its end.
ANSWER, BEYOND = 24, 12


@frozen
class Material:
    """A verifier, prompts, and its greedy answers to them (ANSWER + BEYOND tokens each)."""

    folder: Path
    facts: VerifierFacts
    model: nn.Module
    prompts: list[list[int]]
    answers: list[list[int]]


@frozen
class Served:
    """What vLLM did with a checkpoint, beside the verifier and as the model; and what the simulator says of it."""

    outputs: Mapping[str, Sequence[Sequence[int]]]
    counters: Mapping[str, DraftCounters]
    simulated: DraftCounters


def make_material(verifier: Path, lengths: Sequence[int] = LENGTHS) -> Material:
    """*verifier*'s greedy answers to random prompts of these *lengths*, in float32."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 300, (length,), generator=generator).tolist() for length in lengths]
    model = load_verifier(verifier, dtype=torch.float32, device=torch.device("cpu"))
    answers = generate_greedily(model, prompts, ANSWER, BEYOND, ())
    return Material(verifier, read_verifier(verifier), model, prompts, answers)


def make_sure_of_answers(verifier: Path, lengths: Sequence[int], *, steps: int = 60, gap: float = 4.0) -> None:
    """Train the verifier on its own answers until bfloat16 changes none, and write it in bfloat16.

    A random model has near ties in every answer, which rounding decides; where the answers part, nothing that follows
    can be compared.

    Args:
        gap: by how much the first choice leads the second one everywhere, in logits. Rounding moves a logit by some
            hundredths.
    """
    material = make_material(verifier, lengths)
    model = material.model.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    rows = [
        (torch.tensor([prompt + answer]), len(prompt))
        for prompt, answer in zip(material.prompts, material.answers, strict=True)
    ]
    with _one_thread():
        for _ in range(steps):
            for ids, start in rows:
                logits = model(input_ids=ids).logits[0, start - 1 : -1]
                (nn.functional.cross_entropy(logits, ids[0, start:]) / len(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(verifier)
    settled = make_material(verifier, lengths)
    assert settled.answers == material.answers
    for ids, start in rows:
        with torch.no_grad():
            first, second = settled.model(input_ids=ids).logits[0, start - 1 : -1].topk(2).values.unbind(-1)
        assert float((first - second).min()) > gap


def documents(material: Material, layer_ids: Sequence[int]) -> list[PackedRow]:
    """A row for each prompt and answer, captured in float32."""
    sequences = [prompt + answer for prompt, answer in zip(material.prompts, material.answers, strict=True)]
    ids = [*layer_ids, material.facts.num_layers]
    rows: dict[int, PackedRow] = {}
    for index, states in features(material.model, sequences, ids, batch_tokens=2048):
        length, width = len(sequences[index]), material.facts.hidden_size
        rows[index] = PackedRow(
            input_ids=torch.tensor(sequences[index]),
            position_ids=torch.arange(length),
            document_ids=torch.zeros(length, dtype=torch.int64),
            loss_mask=torch.arange(length) >= len(material.prompts[index]),
            taps=states[:, :-width],
            last_hidden=states[:, -width:],
            sample_ids=(f"{index:032x}",),
        )
    return [rows[index] for index in range(len(sequences))]


def learn(
    material: Material, registry: PluginRegistry, steps: int, rate: float
) -> Callable[[Algorithm, DraftAlgorithm, nn.Module], None]:
    """A function that trains a draft on the material, by the core's own step: warm-up, then down to nothing."""

    def train(registered: Algorithm, algorithm: DraftAlgorithm, model: nn.Module) -> None:
        setup = algorithm.setup
        row = pack_documents(documents(material, setup.capture.layer_ids))
        objective = Objective(
            algorithm=algorithm,
            model=model.train(),
            teacher=Teacher(setup.weights, setup.vocabulary, device="cpu", compute_dtype=torch.float32),
            loss=build_loss(registry.losses, registered.loss, registered.loss_options),
            reduction=registered.reduction,
            out_of_vocabulary="renormalise",
            compute_dtype=torch.float32,
        )
        sizes = {setup.vocabulary.draft_size, setup.vocabulary.target_size}
        optimizers = build_optimizers(model, TrainConfig(learning_rate=rate), sizes)
        with _one_thread():
            for step in range(steps):
                optimizers.set_rate(min(1.0, (step + 1) / 20) * (1 - step / steps))
                train_step(objective, optimizers, [row], [torch.Generator().manual_seed(step)], clip_norm=1.0)
        model.eval()

    return train


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def serve(
    material: Material,
    exports: Mapping[str, SimpleNamespace],
    registry: PluginRegistry,
    folder: Path,
    *,
    as_model: Collection[str],
) -> dict[str, Served]:
    """Serve each checkpoint beside the verifier, those named in *as_model* as the model too. All engines in one
    process, so that every draft must want the same environment.

    Returns:
        name → what came of it; the verifier's own outputs are ``outputs["alone"]`` of each.
    """
    plans = {
        name: open_format(schema_for(each.config, registry)).serving(each.config) for name, each in exports.items()
    }
    needed = [
        required_environment(plan) | (v2_environment() if plan.needs_v2_runner else {}) for plan in plans.values()
    ]
    assert all(each == needed[0] for each in needed)
    requests = [request(material, "alone", str(material.folder), {})]
    for name, plan in plans.items():
        checkpoint = str(exports[name].folder)
        beside = {"speculative_config": speculative_config(plan, checkpoint)}
        requests.append(request(material, f"{name}-beside", str(material.folder), {**plan.engine, **beside}))
        if name in as_model:
            requests.append(request(material, f"{name}-as_model", checkpoint, plan.engine))
    results = run_engines(requests, folder, required=needed[0])
    served = {}
    for name, plan in plans.items():
        ways = {way: results[f"{name}-{way}"] for way in ("beside", "as_model") if f"{name}-{way}" in results}
        served[name] = Served(
            outputs={"alone": results["alone"].outputs} | {way: result.outputs for way, result in ways.items()},
            counters={way: result.counters or DraftCounters.none(0) for way, result in ways.items()},
            simulated=simulated(material, exports[name].folder, plan.num_speculative_tokens, registry),
        )
    return served


def request(material: Material, name: str, model: str, further: Mapping[str, Any]) -> EngineRequest:
    return EngineRequest(
        name=name,
        engine={
            "model": model,
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": len(material.prompts),
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
            **further,
        },
        prompts=material.prompts,
        sampling={"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True},
    )


def simulated(material: Material, folder: Path, num_steps: int, registry: PluginRegistry) -> DraftCounters:
    """The simulator's count, from the checkpoint's files and the verifier alone."""
    algorithm, model, _ = load_draft(folder, registry, verifier=material.folder)
    rows = documents(material, algorithm.setup.capture.layer_ids)
    simulations = [
        simulate(algorithm, model, row.input_ids, row.taps, len(prompt), num_steps, max_tokens=ANSWER)
        for row, prompt in zip(rows, material.prompts, strict=True)
    ]
    assert all(each.complete for each in simulations)
    return Simulation.total(simulations, num_steps)


def assert_served_as_trained(served: Served, material: Material, *, at_least: float) -> None:
    """Output is the verifier's own both ways; vLLM counts what the simulator counts; and the draft helps."""
    own = [tuple(answer[:ANSWER]) for answer in material.answers]
    for way, outputs in served.outputs.items():
        assert list(outputs) == own, way
    ours = served.simulated
    for way, theirs in served.counters.items():
        # The same rounds; a near tie of the draft's own logits may fall the other way once.
        assert abs(ours.drafts - theirs.drafts) <= 1, (way, ours, theirs)
        pairs = zip(ours.accepted_per_position, theirs.accepted_per_position, strict=True)
        assert all(abs(mine - vllms) <= 1 for mine, vllms in pairs), (way, ours, theirs)
    rates = ours.acceptance_per_position
    assert rates[0] >= at_least, rates
    assert rates[-1] > 0, rates
