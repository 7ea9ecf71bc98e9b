"""All stages of a run, one after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.config.resolve import RUN_FILE, ResolvedRun
from draftsmith.errors import ConfigError, OutputError, Problem, UserError, mark_shared
from draftsmith.plugins import load_reference
from draftsmith.plugins.blame import naming_plugins
from draftsmith.plugins.results import check_items
from draftsmith.stages import (
    FILE,
    STAGES,
    Stage,
    StageRecord,
    is_first_rank,
    process_count,
    sole_writer,
    write_json_atomically,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_attention", "claim_output", "run_all"]

#: The function that runs each stage.
_FUNCTIONS: Mapping[str, str] = {
    "prepare": "draftsmith.data.prepare:run_prepare",
    "capture": "draftsmith.capture.run:run_capture",
    "train": "draftsmith.train.run:run_train",
    "export": "draftsmith.checkpoint.export:run_export",
    "verify": "draftsmith.serving.verify:run_verify",
}
#: Attribute of :class:`~draftsmith.stages.RunFolders` with each stage's folder.
_FOLDERS: Mapping[str, str] = {
    "prepare": "prepared",
    "capture": "states",
    "train": "training",
    "export": "checkpoint",
    "verify": "verification",
}
#: Stages that use the prepared data for this algorithm.
_TRAINED_ON = ("capture", "train")
_NO_STAGE = "capture: no stage of this run; training captures while it goes on (capture.mode: online)"
#: Prints the closing table of a verification.
_VERIFICATION = "draftsmith.serving.verify:print_verification"


def claim_output(run: ResolvedRun) -> None:
    """Make sure that the output folder is this run's to write to, and leave a first ``run.json`` there.

    Raises:
        OutputError: the folder holds something that is not of a run, or cannot be written to.
    """
    output = run.folders.output
    try:
        there = [each for each in output.iterdir() if not each.name.startswith(".")]
    except FileNotFoundError:
        there = []
    except OSError as error:
        raise OutputError(f"the output folder cannot be read: {error.strerror}", where=str(output)) from error
    ours = any(each.name == RUN_FILE or (each / FILE).is_file() for each in there)
    if there and not ours:
        raise OutputError(
            f"the output folder is not empty ({there[0].name}, …), and what is there is not of a run",
            where=str(output),
            hint="choose another output, or move what is there away",
        )
    if not (output / RUN_FILE).exists():
        write_run_file(run)


def write_run_file(run: ResolvedRun) -> None:
    """``run.json``: the resolved recipe, where each value came from, plugins and versions.

    Of several processes of one run the first writes it for all.
    """
    if not is_first_rank():
        return
    write_json_atomically(run.folders.output / RUN_FILE, run.record())


def run_all(
    run: ResolvedRun,
    console: Console | None,
    *,
    overwrite: bool = False,
    stages: Sequence[str] | None = None,
) -> dict[str, StageRecord]:
    """Run the stages in order; those that are complete, with the same inputs, are not run again.

    Args:
        console: where progress and summaries go; None: nowhere.
        overwrite: make stages anew whose stored output was made from other inputs.
        stages: names of :data:`draftsmith.stages.STAGES`; None: all.

    Returns:
        The record of each stage that was run.

    Raises:
        ConfigError: the algorithm cannot use the recipe's mask or form of attention, or the prepared data; or capture
            alone is asked for, where states are captured while training.
        CheckpointError: training would begin from a checkpoint of another vocabulary than that of the prepared data.
        OutputError: the output is not this run's to write to, or another command is at work there.
        UserError: several processes were started for something else than training.
        PluginError: a plugin's code raises what is no error of draftsmith's.
    """
    wanted = stages_of(run, stages, console if is_first_rank() else None)
    check_processes(run, wanted)
    # Within what tells the other processes: they are to hear of the plugin too.
    with _together(run), naming_plugins():
        if {"prepare", *_TRAINED_ON} & set(wanted):
            warning = check_attention(run)
            if warning is not None and console is not None and is_first_rank():
                console.print(warning, markup=False, highlight=False, soft_wrap=True)
        if {"prepare", "train"} <= set(wanted):
            check_transport(run)
        if is_first_rank():
            claim_output(run)
        with sole_writer(run.folders.output):
            return _run_stages(run, console if is_first_rank() else None, overwrite=overwrite, wanted=wanted)


def check_processes(run: ResolvedRun, wanted: Sequence[str]) -> None:
    """Whether as many processes as were started can do what is wanted.

    Raises:
        UserError: they cannot: training alone is done by several.
        ConfigError: there are more of them than rows in a step.
    """
    count = process_count()
    if count > 1 and list(wanted) != ["train"]:
        raise mark_shared(only_training_is_shared(count))
    rows = run.recipe.train.rows_per_step
    if count > rows:
        what = f"{count} processes cannot share the {rows} row{'s' * (rows > 1)} of a step"
        hint = f"start at most {rows} (--nproc-per-node), or set train.rows_per_step to a multiple of {count}"
        raise mark_shared(ConfigError([Problem(what, where="train.rows_per_step", hint=hint)]))


def only_training_is_shared(count: int) -> UserError:
    """The error of a command that is not to be run by several processes, and was."""
    return UserError(
        f"this was started as one of {count} processes; `draftsmith train` alone can be",
        where="environment (WORLD_SIZE)",
        hint="run this command once, without torchrun (or unset WORLD_SIZE), and then "
        "`torchrun … -m draftsmith train RECIPE`",
    )


def _together(run: ResolvedRun) -> contextlib.AbstractContextManager[object]:
    """The other processes of this training, where there are any: what fails from here on, all of them are told."""
    if process_count() == 1:
        return contextlib.nullcontext()
    from draftsmith.train.distributed import join

    return join(run.recipe.train.device, timeout=run.recipe.train.rank_timeout)


def stages_of(run: ResolvedRun, stages: Sequence[str] | None, console: Console | None) -> list[str]:
    """Those of *stages* that *run* has, in order. Where states are captured while training, capture is none of them.

    Raises:
        ConfigError: nothing else is asked for.
    """
    wanted = [name for name in STAGES if stages is None or name in stages]
    if not run.recipe.captures_online or "capture" not in wanted:
        return wanted
    if wanted == ["capture"]:
        raise ConfigError(
            [
                Problem(
                    "with capture.mode: online, states are captured while the draft is trained, not before",
                    where="capture.mode",
                    hint="run `draftsmith train`, or `draftsmith run` for all stages; where servers capture "
                    "(online.endpoints), `draftsmith capture serve` starts one",
                )
            ]
        )
    if console is not None:
        console.print(_NO_STAGE, markup=False, highlight=False, soft_wrap=True)
    return [name for name in wanted if name != "capture"]


def _run_stages(
    run: ResolvedRun, console: Console | None, *, overwrite: bool, wanted: Sequence[str]
) -> dict[str, StageRecord]:
    records: dict[str, StageRecord] = {}
    spent: dict[str, float] = {}
    for name in wanted:
        if console is not None and len(wanted) > 1:
            console.rule(f"[bold]{name}", align="left")
        before = Stage(name, getattr(run.folders, _FOLDERS[name])).record()
        started = time.monotonic()
        if name in _TRAINED_ON:
            check_data(run)
        stage: Callable[..., StageRecord] = load_reference(_FUNCTIONS[name])
        records[name] = stage(run, console, overwrite=overwrite)
        spent[name] = time.monotonic() - started
        # Written again after a stage, not before: one that refuses other inputs leaves the record of what is there.
        write_run_file(run)
        if name == "prepare":
            check_data(run)
        if console is not None and before is not None and before.complete and before == records[name]:
            console.print(f"{name}: complete, with the same inputs; not run again", markup=False, highlight=False)
    if console is not None and len(wanted) > 1:
        print_times(console, records, spent)
    if console is not None and "verify" in records:
        print_verification(console, records["verify"])
    return records


def check_attention(run: ResolvedRun) -> str | None:
    """Whether the algorithm can use the mask and the form of attention that the recipe chooses.

    Known before anything is made, as is a mask that vLLM does not serve by: the line that warns of it is returned. The
    rule itself is asked, which takes torch; the defaults need no asking.

    Raises:
        ConfigError: it cannot, and why.
    """
    form = run.recipe.train.attention
    if run.mask.name == run.algorithm.mask and form == "auto":
        return None
    from draftsmith.interfaces import DraftAlgorithm
    from draftsmith.train.served_mask import mask_remark
    from draftsmith.train.setup import build_mask

    implementation: type[DraftAlgorithm] = load_reference(run.algorithm.implementation, expected=DraftAlgorithm)
    implementation.check_attention(run.algorithm_options, build_mask(run), form)
    remark = mask_remark(run)
    return None if remark is None else f"warning: mask: {remark}"


def check_transport(run: ResolvedRun) -> None:
    """Whether what carries states while the draft is trained can be reached: known before data are prepared for hours.

    Raises:
        TransportError, UserError: it cannot.
    """
    record = Stage("train", run.folders.training).record()
    if not run.recipe.captures_online or (record is not None and record.complete):
        return
    from draftsmith.capture.states import run_transport

    run_transport(run).free_bytes()


def check_data(run: ResolvedRun) -> None:
    """Whether the algorithm can be trained on what was prepared, known before states are captured of it.

    Raises:
        ConfigError: with all problems found; nothing, where the data are not prepared yet.
        CheckpointError: training would begin from a checkpoint of another vocabulary.
    """
    record = Stage("prepare", run.folders.prepared).record()
    if record is None or not record.complete:
        return
    from draftsmith.data.dataset import open_prepared

    if run.recipe.train.warm_start is not None:
        from draftsmith.checkpoint.warm_start import check_vocabulary

        folder = Path(run.recipe.train.warm_start).expanduser()
        check_vocabulary(folder, open_prepared(run.folders.prepared).vocabulary())
    if run.algorithm.check_data is None:
        return
    facts = open_prepared(run.folders.prepared).facts(run.recipe.train.tokens_per_row)
    told = run.algorithm.check_data(run.algorithm_options, run.verifier, facts)
    problems = check_items(run.algorithm.check_data, told, Problem)
    if problems:
        raise ConfigError(problems)


def print_times(console: Console, records: Mapping[str, StageRecord], spent: Mapping[str, float]) -> None:
    """Seconds by stage: of this command, and over all starts."""
    from rich.table import Table

    table = Table(title="Time by stage, in seconds", title_justify="left")
    table.add_column("stage")
    table.add_column("this time", justify="right")
    table.add_column("all starts", justify="right")
    for name, record in records.items():
        table.add_row(name, f"{spent[name]:.1f}", f"{record.seconds:.1f}")
    table.add_section()
    table.add_row("total", f"{sum(spent.values()):.1f}", f"{sum(each.seconds for each in records.values()):.1f}")
    console.print(table)


def print_verification(console: Console, record: StageRecord) -> None:
    """The figures of the verification, last of all."""
    show: Callable[[Any, StageRecord], None] = load_reference(_VERIFICATION)
    show(console, record)
