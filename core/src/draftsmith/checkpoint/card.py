"""The model card (README.md) of an exported checkpoint: what it is, of what it was made, how to serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import __version__
from draftsmith.api import PROJECT_NAME, ServingPlan
from draftsmith.stages import write_text_atomically

if TYPE_CHECKING:
    from draftsmith.config.resolve import ResolvedRun

__all__ = ["CARD", "add_measurement", "engine_arguments", "model_card", "serving_commands", "speculative_config"]

CARD = "README.md"
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def speculative_config(plan: ServingPlan, checkpoint: str) -> dict[str, Any]:
    """vLLM's ``speculative_config`` that serves the draft in the folder *checkpoint* as *plan* says."""
    return {
        "method": plan.method,
        "model": checkpoint,
        "num_speculative_tokens": plan.num_speculative_tokens,
        **plan.extra,
    }


def serving_commands(plan: ServingPlan, verifier: str, checkpoint: str) -> list[str]:
    """The commands that serve the checkpoint: as the model itself where that works, and beside its verifier."""
    serve = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()), "vllm serve"])
    further = "".join(f" {argument}" for argument in engine_arguments(plan.engine))
    speculative = shlex.quote(json.dumps(speculative_config(plan, checkpoint)))
    beside = f"{serve} {verifier} --speculative-config {speculative}{further}"
    return [f"{serve} {checkpoint}{further}", beside] if plan.as_model else [beside]


def engine_arguments(engine: Mapping[str, Any]) -> Iterator[str]:
    """Engine arguments as ``vllm serve`` spells them in a shell."""
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            shown = value if isinstance(value, str) else json.dumps(value)
            yield f"--{flag} {shlex.quote(shown)}"


def _how_to_serve(plan: ServingPlan, verifier: str) -> list[str]:
    if plan.unservable is not None:
        return [f"{plan.unservable}.", *plan.notes]
    notes = " ".join(["`.` is this folder.", *_serving_notes(plan)])
    return ["```", *serving_commands(plan, verifier, "."), "```", "", notes]


def _serving_notes(plan: ServingPlan) -> Iterator[str]:
    if plan.needs_v2_runner:
        yield "vLLM's model runner V2 is needed; vLLM chooses it by itself wherever it can run."
    yield from plan.notes


def model_card(
    run: ResolvedRun,
    plan: ServingPlan,
    verifier: str,
    summaries: Mapping[str, Mapping[str, Any]],
    *,
    mask_remark: str | None = None,
) -> str:
    """README.md of the run's checkpoint.

    Args:
        verifier: name or path as written into the checkpoint.
        summaries: stage → its recorded figures, for those of the stages before the export.
        mask_remark: what to know where it was trained with another mask than vLLM serves it by.
    """
    recipe = run.resolved_recipe()
    options = {**recipe["algorithm"]["options"], **run.derived}
    lines = [
        "---",
        f"base_model: {json.dumps(verifier)}",
        "library_name: vllm",
        "tags: [speculative-decoding, draft-model]",
        "---",
        "",
        f"# {run.verifier.path.name}: a draft model ({run.algorithm.name})",
        "",
        f"{run.algorithm.summary}. It proposes {plan.num_speculative_tokens} tokens a round, which the verifier "
        "checks: what is served is the verifier's output, sooner.",
        "",
        f"Made by {PROJECT_NAME} {__version__}.",
        "",
        "## Serve",
        "",
        *_how_to_serve(plan, verifier),
        "",
        *([f"{mask_remark[0].upper()}{mask_remark[1:]}.", ""] if mask_remark else []),
        _BEGIN,
        _END,
        "",
        "## Verifier",
        "",
        f"* {verifier} ({', '.join(run.verifier.architectures)}), fingerprint {run.verifier.fingerprint}",
        f"* hidden states of layers {', '.join(map(str, run.requirements.layer_ids))} of {run.verifier.num_layers}",
        "",
        "## Data",
        "",
        *[f"* {source}" for source in run.recipe.data.sources],
        f"* answers: {recipe['data']['responses']}; template arguments: "
        f"{json.dumps(recipe['data']['template_arguments'])}",
        *_figures(summaries.get("prepare", {})),
        "",
        "## Training",
        "",
        f"* loss {run.loss.name} {json.dumps(recipe['loss']['options']) if run.loss_options else ''}".rstrip(),
        *[f"* {key}: {_shown(value)}" for key, value in options.items()],
        *[
            f"* {key}: {_shown(recipe['train'][key])}"
            for key in ("epochs", "tokens_per_row", "rows_per_step", "optimizer", "learning_rate", "schedule", "seed")
        ],
        "",
        "Validation, teacher-forced: the mean over all starts, in rows like those that were trained on. What is "
        "served is measured on other prompts, from where each round ends, and is usually lower:",
        "",
        *_figures(summaries.get("train", {})),
        "",
    ]
    return "\n".join(lines)


def _figures(summary: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key} ")
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield f"* {prefix}{key}: {_shown(value)}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def add_measurement(folder: Path, text: str) -> None:
    """Put what was measured while serving into the card in *folder*, in place of an earlier measurement.

    A card without the place for it (somebody wrote their own) is left alone.
    """
    path = folder / CARD
    try:
        card = path.read_text(encoding="utf-8")
    except OSError:
        return
    before, begin, rest = card.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        write_text_atomically(path, f"{before}{_BEGIN}\n{text.strip()}\n{_END}{after}")
