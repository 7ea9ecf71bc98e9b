"""What an implementation must offer. Each class here is named by one value of :mod:`draftsmith.api`.

Shapes: T tokens of a packed row, A tapped layers, H_t target width, H draft width, V_t target vocabulary, V_d draft
vocabulary, N draft slots (one predicted position each), K speculative tokens, C rows of one chunk.

Torch is imported for annotations only, so this module can be read by tools without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from attrs import field, frozen

from draftsmith.api import CaptureRequirements, Problem, ServingPlan, VerifierFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "AlgorithmSetup",
    "CheckpointFormat",
    "DraftAlgorithm",
    "DraftArchitecture",
    "DraftSlots",
    "Drafter",
    "ExportContext",
    "Finding",
    "HiddenStateReader",
    "HiddenStateSample",
    "HiddenStateTransport",
    "HiddenStateWriter",
    "MaskRule",
    "PackedRow",
    "PositionLoss",
    "ScoredSlots",
    "Slots",
    "StateLayout",
    "TeacherChunk",
    "TensorSpec",
    "VerifierWeights",
    "VocabularyMap",
]


# --- data -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class VocabularyMap:
    """The reduced draft vocabulary, in vLLM's offset convention.

    ``target_id = draft_id + d2t[draft_id]``; ``nonzero(t2d) == arange(V_d) + d2t``. When V_d == V_t the map is the
    identity and an exported checkpoint ships neither tensor.

    Attributes:
        d2t: int64 [V_d], offsets.
        t2d: bool [V_t], True where the target token is kept.
    """

    d2t: Tensor
    t2d: Tensor

    @property
    def draft_size(self) -> int:
        return int(self.d2t.shape[0])

    @property
    def target_size(self) -> int:
        return int(self.t2d.shape[0])

    @property
    def is_identity(self) -> bool:
        return self.draft_size == self.target_size

    def kept_ids(self) -> Tensor:
        """int64 [V_d]: the target id of every draft id, ascending."""
        import torch

        return self.d2t + torch.arange(self.draft_size, device=self.d2t.device)


@frozen(kw_only=True)
class PackedRow:
    """Several documents in one training row; nothing of one may be visible to another.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], restarting at 0 in every document.
        document_ids: int64 [T]: 0, 1, 2, …; -1 is padding.
        loss_mask: bool [T]: True where the verifier itself produced the token.
        taps: [T, A * H_t], the captured features in the order of the layer ids.
        last_hidden: [T, H_t], the stream before the verifier's final norm (layer id n).
        teacher_token: int64 [T] or None: argmax of the verifier's full-vocabulary logits at this token.
        teacher_logsumexp: float32 [T] or None: logsumexp of those logits.
        sample_ids: id of each document.
    """

    input_ids: Tensor
    position_ids: Tensor
    document_ids: Tensor
    loss_mask: Tensor
    taps: Tensor
    last_hidden: Tensor
    teacher_token: Tensor | None = None
    teacher_logsumexp: Tensor | None = None
    sample_ids: tuple[str, ...] = ()


@frozen(kw_only=True)
class VerifierWeights:
    """The few tensors of the verifier that training needs; its layers are never loaded.

    Attributes:
        embed_tokens: [V_t, H_t].
        lm_head: [V_t, H_t] (the embedding again where the verifier ties them).
        final_norm: the verifier's *own* norm module with its weight (some families scale by 1 + w).
        logit_softcap, logit_scale: logits = softcap(scale * lm_head(final_norm(y))).
    """

    embed_tokens: Tensor
    lm_head: Tensor
    final_norm: nn.Module
    logit_softcap: float | None = None
    logit_scale: float = 1.0


# --- losses -----------------------------------------------------------------------------------------------------


class TeacherChunk(NamedTuple):
    """The teacher at C supervised slots, restricted to the draft vocabulary.

    Attributes:
        log_p: float32 [C, V_d]: log-probabilities, renormalised over the kept tokens.
        kept_mass: float32 [C]: probability that the full-vocabulary teacher gives the kept tokens.
        top: int64 [C]: argmax within the draft vocabulary (a draft id).
    """

    log_p: Tensor
    kept_mass: Tensor
    top: Tensor


class PositionLoss(ABC):
    """A loss per position, computed in float32 on chunks that the core cuts. Built as ``cls(**options)``.

    The core masks, weights, reduces and fuses it with the projection. Only :meth:`value` must be written; a closed
    form of the gradient makes training faster.
    """

    @abstractmethod
    def value(self, logits: Tensor, teacher: TeacherChunk) -> Tensor:
        """Loss of each position, differentiable in *logits*.

        Args:
            logits: float32 [C, V_d], the draft's.
            teacher: the verifier at the same positions.

        Returns:
            float32 [C].
        """

    def value_and_grad(self, logits: Tensor, teacher: TeacherChunk) -> tuple[Tensor, Tensor]:
        """``value`` [C] and d value[c] / d logits[c, :] as [C, V_d], both detached; *logits* may be overwritten."""
        import torch

        from draftsmith.plugins.results import check_losses, wrong_result

        with torch.enable_grad():
            leaf = logits.detach().requires_grad_(True)
            value = check_losses(self.value, self.value(leaf, teacher), logits.shape[0])
            if not value.requires_grad:
                raise wrong_result(self.value, value, "one that is differentiable in the logits")
            (grad,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), grad


# --- masks ------------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """Coordinates of attention queries or keys: int64 tensors of one shape (or broadcastable to one).

    Attributes:
        index: row in the packed sequence (an anchor's row, for slots that hang on one).
        document: document id; -1 is padding, which nothing attends to.
        position: position inside the document, as used by the rotary embedding.
        step: 0 for rows with the verifier's features, k >= 1 for the k-th drafted continuation.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody asks a slot for
    document: Tensor
    position: Tensor
    step: Tensor


class MaskRule(ABC):
    """Who sees whom. Written elementwise, with tensor operations only, so that flex attention can trace it."""

    def __init__(self, window: int | None = None) -> None:
        """*window* W: a query at position p sees positions (p - W, p]; None means no window."""
        self.window = window

    @abstractmethod
    def __call__(self, query: Slots, key: Slots) -> Tensor:
        """bool, of the broadcast shape of *query* and *key*: True where the query sees the key."""


# --- algorithms -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class AlgorithmSetup:
    """Everything an algorithm is built from, resolved by the core.

    Attributes:
        options: the algorithm's own options (its ``api.Algorithm.options``).
        verifier: facts of the verifier.
        weights: embedding, head and norm of the verifier.
        vocabulary: the draft vocabulary.
        capture: what was captured.
        mask: the mask rule, built.
        architecture: class of the chosen draft architecture.
        attention: ``auto``, ``linear``, ``dense`` or ``flex``.
        compute_dtype: dtype of the matrix products (master weights stay float32).
    """

    options: Any
    verifier: VerifierFacts
    weights: VerifierWeights
    vocabulary: VocabularyMap
    capture: CaptureRequirements
    mask: MaskRule
    architecture: type[DraftArchitecture]
    attention: Literal["auto", "linear", "dense", "flex"]
    compute_dtype: torch.dtype


@frozen(kw_only=True)
class DraftSlots:
    """The draft's predictions of one row, as N slots, before projection to the vocabulary.

    Only supervised slots need to be listed. A *chain* is one start from which the draft continues: slots of one
    chain with ``step`` 0, 1, 2, … are accepted or rejected together by the verifier.

    Attributes:
        terms: pairs (x [N, d], weight [V_d, d]); the logits are the sum of ``x @ weight.T``. Usually one pair, the
            normed hidden state and the head; a low-rank correction is a second one.
        teacher_row: int64 [N], row of the packed row whose teacher distribution the slot predicts.
        step: int64 [N], 0-based place in its chain.
        chain: int64 [N], id of its chain, in [0, chains).
        weight: float32 [N], the position weight (the mask is already applied: a slot not listed has none).
        total_positions: the number of positions that ``local_mean`` divides by.
        num_steps: the longest possible chain (K).
        extra: what the algorithm wants to find again in :meth:`DraftAlgorithm.objective`.
    """

    terms: Sequence[tuple[Tensor, Tensor]]
    teacher_row: Tensor
    step: Tensor
    chain: Tensor
    weight: Tensor
    total_positions: int
    num_steps: int
    extra: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class ScoredSlots:
    """What the core's fused projection returns for the N slots. Only ``loss`` carries a gradient.

    Attributes:
        loss: float32 [N].
        correct: bool [N]: the draft's argmax, as a target id, is the *full-vocabulary* argmax of the teacher.
        acceptance: float32 [N]: sum_v min(p_v, q_v) with the full-vocabulary p (tokens not kept count as rejected).
        kept_mass: float32 [N]: mass of p on the draft vocabulary.
        kept: bool [N]: the teacher's argmax is in the draft vocabulary.
        top_probability: float32 [N]: what the draft gives the teacher's argmax within the draft vocabulary; minus its
            logarithm is the cross-entropy.
    """

    loss: Tensor
    correct: Tensor
    acceptance: Tensor
    kept_mass: Tensor
    kept: Tensor
    top_probability: Tensor


class DraftArchitecture(ABC):
    """Marker base of draft networks: subclass it together with ``torch.nn.Module``.

    The core only needs ``parameters()``, ``state_dict()`` and the two methods below; everything else is between an
    architecture and the algorithms written for it.
    """

    @abstractmethod
    def shared_tensors(self) -> Mapping[str, Tensor]:
        """State-dict names of the tensors copied from the verifier and frozen: not trained, not in training
        checkpoints; compared bit by bit with the verifier's in tests."""

    def vocabulary_tensors(self) -> Collection[str] | None:
        """State-dict names of the matrices with a row for every token: embeddings, heads, low-rank tables of tokens.

        Muon leaves them to AdamW. None: every matrix with a side as long as a vocabulary is taken for one, another
        one of that size, such as a feed-forward's, among them.
        """
        return None


class DraftAlgorithm(ABC):
    """One training recipe, built once per run as ``cls(setup)``."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.setup = setup

    @classmethod
    def check_attention(cls, options: Any, mask: MaskRule, form: Literal["auto", "linear", "dense", "flex"]) -> None:
        """Refuse a mask or a form of attention that a draft with *options* cannot be trained with and served by.

        Asked before anything is made, where the recipe chooses another mask or form than the default. Where nobody
        asked, as in tests, ``cls(setup)`` should refuse the same.

        Raises:
            ConfigError: what cannot be used, and why. The default takes everything.
        """

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A fresh draft (float32, CPU), initialised from torch's global generator, verifier tensors in place."""

    @abstractmethod
    def make_batch(self, row: PackedRow, generator: torch.Generator) -> Any:
        """Shift, sample anchors, …: from a packed row to what :meth:`forward` takes; random only by *generator*."""

    @abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> DraftSlots:
        """The training forward over all steps of one row.

        It is called for every row, also for one that trains nothing, down to a single token of padding: then it lists
        no slot. Processes that train one draft together wait for each other in it.
        """

    def weights(self, slots: DraftSlots, scored: ScoredSlots, counted: Tensor) -> Tensor:
        """The position weights, where they depend on what the draft gets right: float32 [N], without gradient.

        The default are those that :meth:`forward` gave. *counted* is bool [N]: slots left out of the loss are False.
        """
        return slots.weight

    def objective(self, slots: DraftSlots, scored: ScoredSlots, loss: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The scalar to minimise, given the core's reduced *loss*; and further metrics as name → [2] (sum, count)."""
        return loss, {}

    def finish(self, model: nn.Module, validation: Iterable[tuple[DraftSlots, ScoredSlots]]) -> Mapping[str, float]:
        """The last hand on the trained draft, between training and export: calibration, pruning, averaging.

        Called once, with the weights that will be exported (the best by validation) in *model*, in evaluation mode.
        What it changes in the model's own tensors, in place, is exported; training checkpoints stay as they are.

        Args:
            validation: the validation rows that have slots, scored without gradient, with the draws of every
                validation. Scored anew on each pass over it; empty where the run keeps no rows for validation.

        Returns:
            Name → figure, for metrics.jsonl, the train stage's summary, the model card, and the exported config
            (``finish`` under the project's key). Empty, as by default: nothing was changed.
        """
        return {}

    @abstractmethod
    def drafter(self, model: nn.Module) -> Drafter:
        """The serving path, written the slow way: what vLLM does, one position at a time."""


class Drafter(ABC):
    """Drafts as vLLM does. One sequence; float32; used by the simulator and by the replay tests.

    Indices: token x_0 … x_n are known, x_n+1 is the bonus token, for which no features exist yet.

    Attributes:
        starts_at_once: how many starts the simulator asks :meth:`propose_each` for. With 1 it asks round by round.
    """

    starts_at_once: ClassVar[int] = 1

    @abstractmethod
    def propose(self, token_ids: Tensor, taps: Tensor, num_tokens: int, *, forced: Tensor | None = None) -> Tensor:
        """Draft num_tokens tokens after the bonus token.

        Args:
            token_ids: int64 [n + 2]: the verified tokens and, last, the bonus token.
            taps: [n + 1, A * H_t]: features of the verified tokens.
            num_tokens: K.
            forced: int64 [K] or None: tokens fed back in place of the draft's own (teacher forcing, for replay).

        Returns:
            float32 [K, V_d]: the draft logits of each drafted position. Implementations may cache what earlier
            calls with the same prefix computed; a call must not depend on whether they did.
        """

    def propose_each(
        self,
        token_ids: Tensor,
        taps: Tensor,
        bonus: Sequence[int],
        num_tokens: int,
        *,
        forced: Tensor | None = None,
    ) -> Tensor:
        """Draft after each of several bonus tokens of one known sequence what :meth:`propose` drafts after it alone.

        Override it, and raise ``starts_at_once``, where one pass for many starts is faster than a pass for each.

        Args:
            token_ids: int64 [T]: the known tokens, up to the last bonus token at least.
            taps: [T or T - 1, A * H_t]: features; no start may look at those of its bonus token or later ones.
            bonus: S indices into *token_ids*, each at least 1.
            num_tokens: K.
            forced: int64 [S, K] or None, as in :meth:`propose`.

        Returns:
            float32 [S, K, V_d].
        """
        import torch

        from draftsmith.plugins.results import check_drafted

        drafted = [
            self.propose(
                token_ids[: each + 1], taps[:each], num_tokens, forced=None if forced is None else forced[place]
            )
            for place, each in enumerate(bonus)
        ]
        return torch.stack([check_drafted(self.propose, each, (num_tokens, None)) for each in drafted])

    def reset(self) -> None:
        """Forget the sequence."""


# --- exported checkpoints ---------------------------------------------------------------------------------------


@frozen(kw_only=True)
class TensorSpec:
    """Shape and dtype (safetensors' names, e.g. ``BF16``; None: any float) of an exported tensor.

    Attributes:
        refused: vLLM refuses a checkpoint without it. Of most tensors it does not notice that they are missing.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    required: bool = True
    why: str = ""
    refused: bool = False


@frozen(kw_only=True)
class Finding:
    """One remark of the linter. ``error``: vLLM fails or drafts nonsense; ``warning``: it works and may disappoint."""

    severity: Literal["error", "warning"]
    what: str
    where: str
    hint: str = ""


@frozen(kw_only=True)
class ExportContext:
    """What an exporter needs beside the model.

    Attributes:
        verifier_name: written as ``speculators_config.verifier.name_or_path``.
        speculative_tokens: K written into the config.
        include_embedding: write embed_tokens although vLLM shares the verifier's.
    """

    setup: AlgorithmSetup
    verifier_name: str
    speculative_tokens: int
    include_embedding: bool = False


class CheckpointFormat(ABC):
    """Reads, writes and checks one exported format. Built as ``cls()``.

    Attributes:
        native: config.json is that of a model which vLLM knows by ``model_type`` and ``architectures``, and the
            tensors have its names; only what says who drafts, for whom, and how many tokens is added. What a linter
            asks of the layers of a draft is then left to :meth:`lint`.
    """

    native: ClassVar[bool] = False

    @abstractmethod
    def config(self, context: ExportContext) -> dict[str, Any]:
        """config.json of the export, every flag written explicitly."""

    @abstractmethod
    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        """Exported name → tensor. The core casts floating tensors to the dtype that :meth:`expected_tensors` asks for;
        where it asks for none, to the export dtype."""

    @abstractmethod
    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        """Every tensor that this config allows, by exported name, with its shape. Torch-free."""

    def as_loaded(self, config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """*present* as vLLM's loader takes it: other names that it knows resolved to those of
        :meth:`expected_tensors`, and what it skips left out. Torch-free."""
        return present

    @abstractmethod
    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: VerifierFacts | None
    ) -> Sequence[Finding]:
        """Findings beyond shapes and names (which the core compares): flags, ids, ranges. Torch-free."""

    def unread_files(self, config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, str]:
        """Of *names*, the files in a checkpoint's folder, those that vLLM takes weights from, and :meth:`load` not.

        The simulator and training would draft with other weights than vLLM, so such a checkpoint is neither loaded
        nor begun from, and lint warns of it. Torch-free.

        Returns:
            Name → what vLLM does with the file, as the end of a sentence; empty (the default): there are none.
        """
        return {}

    @abstractmethod
    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Put exported tensors back into a model built for the same setup; the inverse of :meth:`tensors`."""

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: VerifierFacts
    ) -> Sequence[Problem]:
        """Why training with *options* cannot begin from a checkpoint of this *config*; empty (the default): it can.

        Asked before anything heavy starts, for a config of one of the types that the schema reads or begins from, or
        of no type: some other project's, which :meth:`options` may know. The core compares layer ids, the draft's
        vocabulary and, by way of :meth:`load`, names and shapes itself. Torch-free.
        """
        return ()

    def warm_start(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Sequence[str]:
        """Put a checkpoint's tensors into a fresh *model* that training begins from; the default: :meth:`load`.

        What is shared with the verifier is the verifier's again afterwards, whatever the checkpoint holds.

        Returns:
            State-dict names of what stays freshly initialised.

        Raises:
            CheckpointError: the tensors are not those of the model.
        """
        self.load(model, tensors, config)
        return ()

    @abstractmethod
    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The algorithm's options that the config implies, so that a checkpoint alone rebuilds its network."""

    @abstractmethod
    def capture(self, config: Mapping[str, Any], verifier: VerifierFacts) -> CaptureRequirements:
        """The layer ids that the draft consumes; vLLM's default where the config does not say."""

    @abstractmethod
    def serving(self, config: Mapping[str, Any]) -> ServingPlan:
        """How vLLM serves it."""


# --- transports -------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class StateLayout:
    """What every sample of one capture has in common; stored with the samples, compared on every open.

    Attributes:
        fingerprint: hex digest of what the states depend on (verifier, tokenizer, template, layer ids, dtype).
        layer_ids: ids stored, taps first, id n last.
        hidden_size: H_t.
        dtype: torch's name of the stored dtype, such as ``bfloat16``.
    """

    fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str


@frozen(kw_only=True)
class HiddenStateSample:
    """The states of one document.

    Attributes:
        sample_id: 32 hex digits, the content hash of the prepared row.
        token_ids: int64 [T].
        hidden_states: [T, len(layer_ids), H_t], in the layout's dtype.
    """

    sample_id: str
    token_ids: Tensor
    hidden_states: Tensor

    def problem(self, layout: StateLayout) -> str | None:
        """Why the sample must be neither published nor used, or None. Writers and readers of all transports ask.

        Checked are the dtypes and shapes, at least one token, and that all values are finite.
        """
        import torch

        from draftsmith.capture.finite import refusal

        token_ids, states = self.token_ids, self.hidden_states
        if token_ids.dtype != torch.int64 or token_ids.ndim != 1 or not len(token_ids):
            return f"token ids must be int64 [T] with T > 0, got {token_ids.dtype} {tuple(token_ids.shape)}"
        wanted = (len(token_ids), len(layout.layer_ids), layout.hidden_size)
        if tuple(states.shape) != wanted or states.dtype != getattr(torch, layout.dtype):
            return f"the layout asks for {layout.dtype} {wanted}, got {states.dtype} {tuple(states.shape)}"
        return refusal(states)


class HiddenStateWriter(ABC):
    """The producer's side. Usable as a context manager; one instance per process."""

    @abstractmethod
    def put(self, sample: HiddenStateSample) -> None:
        """Publish a sample atomically: readers see all of it or nothing. Putting an id again is harmless.

        Raises:
            TransportError, DiskSpaceError: nothing of the sample is visible then.
        """

    def flush(self) -> None:
        """Return when everything put so far is readable by others and survives the death of this process."""

    def close(self) -> None:
        """Flush and release. Idempotent."""

    def __enter__(self) -> HiddenStateWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class HiddenStateReader(ABC):
    """The trainer's side. Picklable, so that data workers open their own."""

    @abstractmethod
    def get(self, sample_id: str, *, expected_tokens: int | None = None) -> HiddenStateSample:
        """Read and check one sample: length, shape, dtype, checksum, finite values.

        Raises:
            SampleMissing, SampleIncomplete, SampleCorrupt: each names the sample and where it lies.
        """

    @abstractmethod
    def complete_ids(self) -> frozenset[str]:
        """Ids of all complete samples."""

    @abstractmethod
    def delete(self, sample_id: str) -> None:
        """Remove a sample; harmless when it is not there."""

    def close(self) -> None:
        """Release. Idempotent."""

    def __enter__(self) -> HiddenStateReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class HiddenStateTransport(ABC):
    """Opens readers and writers on one capture. Built as ``cls(options, location)``; holds no resources itself.

    ``location`` is the folder that the run gives the capture; a transport without files may ignore it. Both methods
    raise :class:`~draftsmith.errors.FingerprintMismatch` when the location holds states of another layout.
    """

    def __init__(self, options: Any, location: Path) -> None:
        self.options = options
        self.location = location

    @abstractmethod
    def writer(self, layout: StateLayout) -> HiddenStateWriter:
        """Open for producing; creates what is missing."""

    @abstractmethod
    def reader(self, layout: StateLayout) -> HiddenStateReader:
        """Open for reading."""

    def place_name(self) -> str:
        """Names where the samples are, alike on every host that puts or reads them there; without a secret in it.

        A trainer compares it with what a capture server says, before the first sample. By default the folder.
        """
        return str(self.location.absolute())

    def claim(self, layout: StateLayout, owner: str) -> None:
        """Take this place for the training run *owner*, before it reads or removes anything there.

        Online training asks, since it removes what it has used: two runs that take the same place for theirs would
        delete each other's samples. Claiming again for the same owner is harmless, so a run that is resumed goes on.
        The default does nothing: where the place is the run's own folder, the run's own checks suffice.

        Args:
            layout: what the samples of this run have in common.
            owner: names the run and outlives its process, such as the absolute path of its output folder.

        Raises:
            OutputError: another run has the place: who, since when, and what to do.
            TransportError: the store cannot be reached.
        """

    def compact(self, layout: StateLayout) -> None:
        """Bring the samples into their resting form, called when a capture is complete. Safe to kill and repeat."""

    def bytes_for(self, layout: StateLayout, tokens: int, samples: int) -> int:
        """Bytes that *samples* samples of *tokens* tokens in all will take at rest."""
        width = {"float32": 4, "float16": 2, "bfloat16": 2}[layout.dtype]
        return tokens * (len(layout.layer_ids) * layout.hidden_size * width + 8) + 256 * samples

    def peak_bytes_for(self, layout: StateLayout, tokens: int, samples: int, *, longest: int) -> int:
        """Bytes that they take at most while they are put and compacted; the longest has *longest* tokens.

        What a capture must find free: a transport that writes its resting form before it removes the other overrides
        this, and says how much of them is there twice at once.
        """
        return self.bytes_for(layout, tokens, samples)

    def free_bytes(self) -> int | None:
        """Bytes that can still be stored; None where the transport cannot say."""
        return None

    def remove_all(self, sample_ids: Iterable[str] | None = None) -> None:
        """Remove these samples; without ids, everything that this capture put, and the claim on its place."""
