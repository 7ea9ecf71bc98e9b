"""What a recipe's run will take of the disk and of memory, before it is started: ``draftsmith doctor RECIPE``.

Sizes come from the verifier's configuration and files, the transport, and the prepared rows where there are some. No
model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftsmith.capture.address import open_transport
from draftsmith.capture.plan import Plan, check_disk, human_bytes
from draftsmith.capture.states import SAMPLES
from draftsmith.doctor import Remark
from draftsmith.errors import DiskSpaceError
from draftsmith.interfaces import StateLayout
from draftsmith.stages import Stage
from draftsmith.verifier import weight_files

if TYPE_CHECKING:
    from draftsmith.api import VerifierFacts
    from draftsmith.config.resolve import ResolvedRun
    from draftsmith.interfaces import HiddenStateTransport

__all__ = ["examine_run", "memory_of_machine", "training_bytes"]

#: Of a trained number: weight, gradient, and AdamW's two moments, in float32.
_TRAINED_BYTES = 16
_WIDTHS = {"auto": 4, "float32": 4, "float16": 2, "bfloat16": 2}
#: Sizes do not depend on whose states they are.
_NO_FINGERPRINT = ""


def examine_run(run: ResolvedRun, devices: tuple[int, ...] = ()) -> Iterator[Remark]:
    """Disk and memory that *run* needs, against what is there.

    Args:
        devices: bytes of each GPU's memory.
    """
    transport = open_transport(run.transport, run.transport_options, run.folders.states / SAMPLES)
    yield from _disk(run, transport)
    memory = devices[0] if devices and run.recipe.train.device != "cpu" else memory_of_machine()
    yield from _memory(run, memory)


def memory_of_machine() -> int:
    """Bytes of the machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- disk -----------------------------------------------------------------------------------------------------------


def _disk(run: ResolvedRun, transport: HiddenStateTransport) -> Iterator[Remark]:
    """The states that are kept, or (while training captures) those that wait to be read."""
    layout = StateLayout(
        fingerprint=_NO_FINGERPRINT,
        layer_ids=run.requirements.ids(run.verifier.num_layers),
        hidden_size=run.verifier.hidden_size,
        dtype=run.recipe.capture.store_dtype,
    )
    lengths = _prepared_lengths(run)
    kept = not run.recipe.captures_online or run.recipe.online.keep
    if kept and lengths is None:
        longest = run.recipe.data.max_length
        each = transport.bytes_for(layout, longest, 1)
        yield Remark(
            about="disk",
            what=f"{human_bytes(each // longest)} of hidden states a token, {human_bytes(each)} a row of {longest}",
            hint="the sum is known when the rows are: `draftsmith prepare`, then this again",
        )
        return
    if not kept:
        count = run.recipe.online.ahead
        window = sorted(lengths or [run.recipe.data.max_length] * count, reverse=True)[:count]
        plan = Plan.of(transport, layout, window, 0)
        what = f"{human_bytes(plan.bytes)} of hidden states, of {len(window)} rows that may wait (online.ahead)"
        yield _against_free(run, plan, what, f"lower online.ahead ({count}), or give the transport more room")
        return
    plan = Plan.of(transport, layout, lengths or [], 0)
    hint = "use fewer rows (data.max_rows), another output folder, or capture.mode: online, which keeps none"
    yield _against_free(run, plan, plan.describe().partition(";")[0], hint)


def _prepared_lengths(run: ResolvedRun) -> list[int] | None:
    record = Stage("prepare", run.folders.prepared).record()
    if record is None or not record.complete:
        return None
    from draftsmith.data.dataset import open_prepared

    data = open_prepared(run.folders.prepared)
    return [*data.train.lengths, *data.validation.lengths]


def _against_free(run: ResolvedRun, plan: Plan, what: str, hint: str) -> Remark:
    where = f"the transport {run.transport.name!r}"
    if plan.free is None:
        return Remark(about="disk", what=f"{what}; {where} does not say how much it has room for")
    what = f"{what}; {where} has room for {human_bytes(plan.free)}"
    try:
        check_disk(plan, where, ignore=False)
    except DiskSpaceError:
        return Remark(about="disk", what=what, severity="error", hint=hint)
    return Remark(about="disk", what=what)


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(run: ResolvedRun, memory: int) -> Iterator[Remark]:
    weights = sum(path.stat().st_size for path in weight_files(run.verifier.path))
    held_here = not (run.recipe.captures_online and run.recipe.online.endpoints)
    if held_here:
        what = f"capture holds the verifier's weights, {human_bytes(weights)} in its files"
        yield _against_memory(what, weights, memory, "capture on a larger machine: `draftsmith capture serve`")
    needed = training_bytes(run)
    hint = "lower train.tokens_per_row, or train on a device with more memory"
    if run.recipe.captures_online and held_here:
        needed += weights
        hint = f"let servers capture (online.endpoints), which hold the verifier's weights; or {hint}"
    what = (
        f"training takes {human_bytes(needed)} at the least, for a draft of one layer like the verifier's; "
        "activations and further layers come on top"
    )
    yield _against_memory(what, needed, memory, hint)


def training_bytes(run: ResolvedRun) -> int:
    """Bytes that training takes at the least: tensors of the verifier, a row's states, and one trained layer.

    A draft's own size is known when it is built; one decoder layer of the verifier's shape, and a projection of the
    tapped states, stand for it. Activations are left out, but for those of one row at the width of the model.
    """
    verifier, train = run.verifier, run.recipe.train
    width = _WIDTHS[train.compute_dtype]
    shared = verifier.vocab_size * verifier.hidden_size * (1 if verifier.tie_word_embeddings else 2) * width
    ids = len(run.requirements.ids(verifier.num_layers))
    states = train.tokens_per_row * ids * verifier.hidden_size * (_WIDTHS[run.recipe.capture.store_dtype] + width)
    trained = _layer(verifier) + len(run.requirements.layer_ids) * verifier.hidden_size**2
    return shared + states + trained * _TRAINED_BYTES


def _layer(verifier: VerifierFacts) -> int:
    """Numbers of one dense decoder layer: attention and a gated feed-forward part."""
    queries = verifier.num_attention_heads * verifier.head_dim
    keys = verifier.num_key_value_heads * verifier.head_dim
    attention = verifier.hidden_size * (2 * queries + 2 * keys)
    return attention + 3 * verifier.hidden_size * verifier.intermediate_size


def _against_memory(what: str, needed: int, memory: int, hint: str) -> Remark:
    what = f"{what}; {human_bytes(memory)} are there"
    if needed > memory:
        return Remark(about="memory", what=what, severity="error", hint=hint)
    if needed > memory * 0.8:
        return Remark(about="memory", what=what, severity="warning", hint=hint)
    return Remark(about="memory", what=what)
