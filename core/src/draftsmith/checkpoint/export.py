"""The export stage: the best training checkpoint as config.json + model.safetensors, as vLLM loads them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith import __version__
from draftsmith.checkpoint.card import CARD, model_card
from draftsmith.checkpoint.exported import (
    CONFIG,
    OWN_KEY,
    SCHEMA,
    TEMPLATE_ARGUMENTS,
    TRAINED_AS,
    WEIGHTS,
    open_format,
)
from draftsmith.checkpoint.lint import lint_checkpoint
from draftsmith.checkpoint.training import load_final_weights, load_weights_into
from draftsmith.config.structure import plain
from draftsmith.data.dataset import open_prepared
from draftsmith.errors import CheckpointError, NumericsError
from draftsmith.interfaces import ExportContext
from draftsmith.speculators import PACKAGE
from draftsmith.stages import (
    Stage,
    StageRecord,
    write_error,
    write_json_atomically,
    write_tensors_atomically,
    write_text_atomically,
)
from draftsmith.train.served_mask import mask_remark
from draftsmith.train.setup import build_algorithm, build_draft
from draftsmith.verifier_weights import load_verifier_weights

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor, nn

    from draftsmith.api import ServingPlan
    from draftsmith.config.resolve import ResolvedRun
    from draftsmith.interfaces import CheckpointFormat, DraftAlgorithm, TensorSpec

__all__ = ["EXPORT_DTYPE", "export_fingerprint", "own_notes", "run_export", "write_export"]

#: What vLLM serves drafts in, whatever the verifier's dtype is.
EXPORT_DTYPE = torch.bfloat16
#: Floating dtypes by safetensors' names, for tensors whose format asks for one.
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def run_export(run: ResolvedRun, console: Console | None = None, *, overwrite: bool = False) -> StageRecord:
    """Export the run's best training checkpoint into ``run.folders.checkpoint``, and lint what was written.

    Raises:
        CheckpointError: there is no finished training, or what was written would not be served correctly.
        NumericsError: a trained tensor is not finite.
        FingerprintMismatch: the folder holds an export from other inputs.
        DiskSpaceError, OutputError: it cannot be written.

    After an error nothing of the export is in the folder: what was written there is known to be served.
    """
    folder = run.folders.checkpoint
    stage = Stage("export", folder)
    fingerprint = export_fingerprint(run)
    if stage.begin(fingerprint, overwrite=overwrite) == "complete":
        if (folder / WEIGHTS).is_file():
            record = stage.record()
            assert record is not None
            return record
        stage.reopen()

    def warn(message: str) -> None:
        if console is not None:
            console.print(f"warning: {message}", markup=False, highlight=False, soft_wrap=True)

    weights, step = load_final_weights(run.folders.training, warn)
    algorithm, model = _build(run)
    load_weights_into(model, weights)
    context = ExportContext(
        setup=algorithm.setup,
        verifier_name=verifier_name(run),
        speculative_tokens=run.speculative_tokens,
        include_embedding=run.recipe.export.include_embedding,
    )
    format_ = open_format(run.schema)
    with _written_aside(folder) as aside:
        config, tensors = write_export(aside, format_, model, context, own_notes(run, step))
        plan = format_.serving(config)
        card = model_card(run, plan, context.verifier_name, _summaries(run), mask_remark=mask_remark(run))
        write_text_atomically(aside / CARD, card)
        _check(aside, run, plan, console)
    record = stage.finish(
        {
            "step": step,
            "tensors": len(tensors),
            "parameters": sum(tensor.numel() for tensor in tensors.values()),
            "bytes": (folder / WEIGHTS).stat().st_size,
            "verifier": context.verifier_name,
            "speculative_tokens": context.speculative_tokens,
        }
    )
    if console is not None:
        console.print(
            f"{folder}: {record.summary['parameters'] / 1e6:.2f} M parameters of step {step}, "
            f"{record.summary['bytes'] / 1e6:.1f} MB, {context.speculative_tokens} tokens a round",
            highlight=False,
            soft_wrap=True,
        )
    return record


@contextlib.contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder beside *folder*, whose files come to lie in *folder* if nothing goes wrong, and else are gone.

    The config is moved last: a folder with a config is loadable.
    """
    aside = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(aside, ignore_errors=True)  # what a kill has left
    try:
        yield aside
        try:
            for path in sorted(aside.iterdir(), key=lambda each: each.name == CONFIG):
                os.replace(path, folder / path.name)
        except OSError as error:
            raise write_error(error, folder) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def export_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """What the exported files depend on.

    Raises:
        CheckpointError: training is not finished.
    """
    trained = Stage("train", run.folders.training).record()
    if trained is None or not trained.complete:
        raise CheckpointError(
            "training is not finished", where=str(run.folders.training), hint="run `draftsmith train` first"
        )
    return {
        "previous": trained.digest,
        "schema": run.schema.name,
        "verifier": verifier_name(run),
        "speculative_tokens": run.speculative_tokens,
        "include_embedding": run.recipe.export.include_embedding,
    }


def verifier_name(run: ResolvedRun) -> str:
    """What the checkpoint calls its verifier: as the recipe says, or the absolute path of the one that was used."""
    return run.recipe.export.verifier_name or str(run.verifier.path.absolute())


def own_notes(run: ResolvedRun, step: int) -> dict[str, Any]:
    """What this project wants to find again in config.json, under a key that vLLM does not read."""
    recipe = run.resolved_recipe()
    trained = Stage("train", run.folders.training).record()
    figures = trained.summary.get("finish") if trained is not None else None
    arguments = dict(run.recipe.data.template_arguments)
    return {
        **({TEMPLATE_ARGUMENTS: arguments} if arguments else {}),
        **({"finish": figures} if figures else {}),
        "version": __version__,
        "algorithm": run.algorithm.name,
        "options": recipe["algorithm"]["options"],
        "architecture": run.architecture.name,
        "mask": run.mask.name,
        SCHEMA: run.schema.name,
        PACKAGE: run.registry.schemas.provider(run.schema.name).distribution,
        "loss": run.loss.name,
        "trained_speculative_tokens": run.algorithm.max_speculative_tokens(run.algorithm_options),
        "step": step,
        "verifier_fingerprint": run.verifier.fingerprint,
    }


def write_export(
    folder: Path,
    format_: CheckpointFormat,
    model: nn.Module,
    context: ExportContext,
    notes: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write config.json and model.safetensors into *folder*; returns what was written.

    Each file is complete before it gets its name, and the config comes last: a folder with a config is loadable.

    Raises:
        CheckpointError: the format's own tensors are not those that its config calls for (nothing is written then).
        NumericsError: a tensor is not finite.
        DiskSpaceError, OutputError: it cannot be written.
    """
    config = {**format_.config(context), "dtype": str(EXPORT_DTYPE).removeprefix("torch."), OWN_KEY: dict(notes)}
    # What the rest of the config comes to; lint finds what was changed since.
    config[OWN_KEY][TRAINED_AS] = plain(format_.options(config))
    expected = format_.expected_tensors(config)
    tensors = {
        name: _exported(name, tensor, expected.get(name)) for name, tensor in format_.tensors(model, context).items()
    }
    _check_complete(expected, tensors)
    write_tensors_atomically(folder / WEIGHTS, tensors)
    write_json_atomically(folder / CONFIG, config)
    return config, tensors


def _exported(name: str, tensor: Tensor, spec: TensorSpec | None) -> Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise NumericsError(
            f"tensor {name} holds values that are not finite", hint="train again, with a lower learning rate"
        )
    dtype = _FLOATS.get(spec.dtype or "", EXPORT_DTYPE) if spec is not None else EXPORT_DTYPE
    # A copy of its own: safetensors refuses tensors that share memory.
    return tensor.to(dtype, copy=True).contiguous()


def _check_complete(expected: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    """vLLM does not notice what is missing, so it is checked here."""
    missing = sorted(name for name, spec in expected.items() if spec.required and name not in tensors)
    unknown = sorted(tensors.keys() - expected.keys())
    wrong = sorted(
        name for name, spec in expected.items() if name in tensors and tuple(tensors[name].shape) != tuple(spec.shape)
    )
    if missing or unknown or wrong:
        raise CheckpointError(
            f"the export would not be what its config says: missing {missing}, unknown {unknown}, "
            f"of another shape {wrong}",
            hint="the checkpoint schema and the draft architecture do not belong together",
        )


def _build(run: ResolvedRun) -> tuple[DraftAlgorithm, nn.Module]:
    device = torch.device("cpu")
    algorithm = build_algorithm(
        run,
        open_prepared(run.folders.prepared).vocabulary(),
        load_verifier_weights(run.verifier, trust_remote_code=run.recipe.trust_remote_code),
        device=device,
        compute_dtype=torch.float32,
    )
    return algorithm, build_draft(algorithm, device, seed=0)


def _summaries(run: ResolvedRun) -> dict[str, Mapping[str, Any]]:
    folders = {"prepare": run.folders.prepared, "capture": run.folders.states, "train": run.folders.training}
    records = {name: Stage(name, folder).record() for name, folder in folders.items()}
    return {name: record.summary for name, record in records.items() if record is not None}


def _check(folder: Path, run: ResolvedRun, plan: ServingPlan, console: Console | None) -> None:
    findings = lint_checkpoint(folder, run.registry, verifier=str(run.verifier.path))
    # That vLLM knows no such draft is no fault of the checkpoint's.
    errors = [each for each in findings if each.severity == "error" and each.what != plan.unservable]
    if errors:
        raise CheckpointError(
            "; ".join(finding.what for finding in errors),
            where=str(run.folders.checkpoint),
            hint=errors[0].hint or None,
        )
    if console is not None:
        for finding in findings:
            console.print(f"warning: {finding.where}: {finding.what}", highlight=False, markup=False)
