"""The recipe: every key a run's YAML file may have, with type, default and meaning.

Plain attrs classes, torch-free. Loading (files, ``--set``, provenance) is in :mod:`draftsmith.config.load`; names
and cross-checks are resolved in :mod:`draftsmith.config.resolve`.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, instance_of, le, lt, optional

__all__ = [
    "CaptureConfig",
    "DataConfig",
    "ExportConfig",
    "GenerationConfig",
    "NamedConfig",
    "OnlineConfig",
    "Recipe",
    "TrainConfig",
    "VerifyConfig",
    "VocabularyConfig",
]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@frozen(kw_only=True)
class NamedConfig:
    """Something asked for by name, with its own options: ``{name: kl_div}`` or just ``kl_div``."""

    name: str = field(metadata=_help("name in the plugins' catalog"))
    options: dict[str, Any] = field(factory=dict, metadata=_help("its own options; `draftsmith plugins show NAME`"))


@frozen(kw_only=True)
class GenerationConfig:
    """Sampling parameters when the verifier writes the answers. Recorded in the data's fingerprint."""

    temperature: float = field(default=0.0, validator=ge(0), metadata=_help("0 is greedy"))
    top_p: float = field(default=1.0, validator=and_(gt(0), le(1)), metadata=_help("nucleus"))
    top_k: int = field(default=0, validator=ge(0), metadata=_help("0: off"))
    max_tokens: int = field(default=512, validator=ge(1), metadata=_help("longest answer, in tokens"))
    batch_size: int = field(default=64, validator=ge(1), metadata=_help("conversations in flight"))
    seed: int = field(default=0, metadata=_help("seed of the sampler; each answer's own seed derives from it"))


@frozen(kw_only=True)
class DataConfig:
    """Conversations and how they become tokens."""

    sources: list[str] = field(
        factory=list, metadata=_help("JSONL or Parquet files (relative to the recipe), or names of hub datasets")
    )
    max_length: int = field(default=2048, validator=ge(8), metadata=_help("longest row, in tokens; cut at the tail"))
    max_rows: int | None = field(
        default=None, validator=optional(ge(1)), metadata=_help("use only so many rows, drawn from all sources")
    )
    validation_share: float = field(
        default=0.1, validator=and_(ge(0), lt(1)), metadata=_help("share of rows kept for validation, by content hash")
    )
    template_arguments: dict[str, Any] = field(
        factory=dict, metadata=_help("arguments of the chat template, such as {enable_thinking: false}")
    )
    responses: Literal["keep", "regenerate"] = field(
        default="keep", metadata=_help("keep the answers of the sources, or let the verifier write them")
    )
    keep_cut_answers: bool = field(
        default=False, metadata=_help("keep answers cut at the length limit (without an end of turn)")
    )
    generation: GenerationConfig = field(factory=GenerationConfig, metadata=_help("used by responses: regenerate"))
    seed: int = field(default=0, metadata=_help("seed of the draw of rows"))


@frozen(kw_only=True)
class VocabularyConfig:
    """The draft's vocabulary."""

    draft_size: int | None = field(
        default=None, validator=optional(ge(1)), metadata=_help("tokens the draft can propose; null: all of them")
    )


@frozen(kw_only=True)
class CaptureConfig:
    """How the verifier's hidden states are obtained."""

    mode: Literal["offline", "online"] = field(
        default="offline", metadata=_help("offline: all states are stored before training; online: while it trains")
    )
    engine: Literal["auto", "vllm", "transformers"] = field(
        default="auto", metadata=_help("auto: vllm where it is installed and can tap this verifier, else transformers")
    )
    dtype: Literal["auto", "bfloat16", "float32"] = field(
        default="auto", metadata=_help("the verifier's compute dtype; auto: its own where the device is fast at it")
    )
    store_dtype: Literal["bfloat16", "float16", "float32"] = field(
        default="bfloat16", metadata=_help("dtype of the stored states")
    )
    batch_tokens: int = field(default=2048, validator=ge(1), metadata=_help("tokens per forward pass"))
    ignore_disk_space: bool = field(default=False, metadata=_help("start although the disk seems too small"))
    refused_share: float = field(
        default=0.1,
        validator=and_(ge(0), le(1)),
        metadata=_help("stop where more of the rows than this have states that are not finite; 1: only where all do"),
    )


@frozen(kw_only=True)
class OnlineConfig:
    """Capture while training: used by ``capture.mode: online``. None of it changes what is trained."""

    endpoints: list[str] = field(
        factory=list,
        metadata=_help("URLs of servers that `draftsmith capture serve` started; empty: this process runs the engine"),
    )
    ahead: int = field(
        default=64, validator=ge(1), metadata=_help("samples asked for before the trainer needs them, at most")
    )
    in_flight: int = field(default=16, validator=ge(1), metadata=_help("requests at one endpoint at once, at most"))
    keep: bool = field(default=False, metadata=_help("keep states for later epochs; false: each is deleted after use"))
    missing: Literal["regenerate", "skip", "stop"] = field(
        default="regenerate",
        metadata=_help("a sample that is lost or damaged is captured again, left out and counted, or stops the run"),
    )
    patience: float = field(
        default=600.0, validator=gt(0), metadata=_help("seconds to wait for endpoints that are all down")
    )
    request_timeout: float = field(
        default=120.0,
        validator=gt(0),
        metadata=_help("seconds for one row at an endpoint; what hangs is noticed by it, and its rows go elsewhere"),
    )


@frozen(kw_only=True)
class TrainConfig:
    """Optimisation. Defaults are those recommended for small and medium runs; recipes override them."""

    epochs: int = field(default=3, validator=ge(1), metadata=_help("passes over the training rows"))
    tokens_per_row: int = field(default=4096, validator=ge(8), metadata=_help("tokens packed into one row (a step)"))
    rows_per_step: int = field(default=1, validator=ge(1), metadata=_help("packed rows per optimiser step"))
    optimizer: Literal["adamw", "muon"] = field(
        default="adamw", metadata=_help("muon: torch's Muon for matrices, AdamW for the rest")
    )
    learning_rate: float = field(default=6e-4, validator=gt(0), metadata=_help("peak, of AdamW"))
    muon_learning_rate: float = field(default=1e-3, validator=gt(0), metadata=_help("peak, of Muon's matrices"))
    weight_decay: float = field(default=0.0, validator=ge(0), metadata=_help("AdamW's"))
    muon_weight_decay: float = field(default=0.1, validator=ge(0), metadata=_help("Muon's"))
    betas: tuple[float, float] = field(
        default=(0.9, 0.95), validator=deep_iterable(and_(ge(0), lt(1))), metadata=_help("AdamW's")
    )
    schedule: Literal["cosine", "linear", "constant"] = field(default="cosine", metadata=_help("after warm-up"))
    warmup_share: float = field(
        default=0.04, validator=and_(ge(0), lt(1)), metadata=_help("share of the steps spent warming up")
    )
    clip_norm: float = field(default=1.0, validator=gt(0), metadata=_help("gradient norm is clipped to this"))
    reduction: Literal["algorithm", "masked_mean", "weighted_mean", "local_mean"] = field(
        default="algorithm", metadata=_help("how positions make one loss; algorithm: the paper's choice")
    )
    out_of_vocabulary: Literal["renormalise", "mask"] = field(
        default="renormalise",
        metadata=_help("positions whose teacher token the draft cannot propose: train on the rest, or leave out"),
    )
    compute_dtype: Literal["auto", "bfloat16", "float32"] = field(
        default="auto", metadata=_help("of matrix products; auto: bfloat16 where the hardware has it")
    )
    attention: Literal["auto", "linear", "dense", "flex"] = field(default="auto", metadata=_help("attention form"))
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=_help("auto: cuda where there is one"))
    seed: int = field(
        default=0,
        validator=and_(ge(-(2**63)), lt(2**63)),  # what torch's generators take
        metadata=_help("of initialisation, data order and sampling"),
    )
    warm_start: str | None = field(
        default=None, metadata=_help("exported checkpoint (a folder) that training begins from; null: fresh weights")
    )
    validate_every: int | None = field(
        default=None, validator=optional(ge(1)), metadata=_help("steps between validations; null: once an epoch")
    )
    checkpoint_every: int | None = field(
        default=None, validator=optional(ge(1)), metadata=_help("steps between checkpoints; null: once an epoch")
    )
    keep_checkpoints: int = field(default=2, validator=ge(1), metadata=_help("latest ones kept, beside the best"))
    bad_samples: Literal["stop", "skip"] = field(
        default="stop",
        metadata=_help("a corrupt or missing sample stops the run, or is skipped and counted (online: see `missing`)"),
    )
    rank_timeout: float = field(
        default=1800.0,
        validator=gt(0),
        metadata=_help("seconds that one of several processes waits for the others before it gives up"),
    )


@frozen(kw_only=True)
class ExportConfig:
    """The served checkpoint."""

    speculative_tokens: int | None = field(
        default=None, validator=optional(ge(1)), metadata=_help("written into the checkpoint; null: as trained")
    )
    include_embedding: bool = field(default=False, metadata=_help("write the embedding although vLLM shares it"))
    verifier_name: str | None = field(
        default=None, metadata=_help("verifier's name or path written into the checkpoint; null: the path used")
    )


@frozen(kw_only=True)
class VerifyConfig:
    """The check in a real vLLM."""

    prompts: str | None = field(
        default=None, metadata=_help("JSONL of conversations that end with a user; null: validation rows' prompts")
    )
    max_prompts: int = field(default=64, validator=ge(1), metadata=_help("prompts used"))
    max_tokens: int = field(default=96, validator=ge(1), metadata=_help("new tokens per prompt"))
    dtype: Literal["float32", "bfloat16"] = field(
        default="float32", metadata=_help("float32 makes identical output a fair demand")
    )
    batch_size: int = field(default=32, validator=ge(1), metadata=_help("sequences in flight"))
    require_vllm: bool = field(default=False, metadata=_help("fail, instead of only simulating, without vLLM"))


@frozen(kw_only=True)
class Recipe:
    """A whole run. Facets left null take the algorithm's own default."""

    verifier: str = field(validator=instance_of(str), metadata=_help("folder (or hub name) of the chat model"))
    algorithm: NamedConfig = field(metadata=_help("name, or {name: …, options: …}"))
    output: str = field(validator=instance_of(str), metadata=_help("folder of everything the run writes"))
    architecture: str | None = field(default=None, metadata=_help("another draft architecture, by name"))
    loss: NamedConfig | None = field(default=None, metadata=_help("another loss, by name"))
    mask: str | None = field(default=None, metadata=_help("another mask rule, by name"))
    schema: str | None = field(default=None, metadata=_help("another checkpoint schema, by name"))
    transport: NamedConfig | None = field(
        default=None, metadata=_help("hidden-state transport; null: the installed one, where there is just one")
    )
    observers: list[str] = field(factory=lambda: ["tensorboard"], metadata=_help("trackers, by name"))
    plugins: list[str] | None = field(default=None, metadata=_help("load only these plugins; null: all installed"))
    trust_remote_code: bool = field(default=False, metadata=_help("run code that comes with the verifier"))
    data: DataConfig = field(factory=DataConfig)
    vocabulary: VocabularyConfig = field(factory=VocabularyConfig)
    capture: CaptureConfig = field(factory=CaptureConfig)
    online: OnlineConfig = field(factory=OnlineConfig)
    train: TrainConfig = field(factory=TrainConfig)
    export: ExportConfig = field(factory=ExportConfig)
    verify: VerifyConfig = field(factory=VerifyConfig)

    @property
    def captures_online(self) -> bool:
        """Whether states are captured while the draft is trained, and not by a stage of their own."""
        return self.capture.mode == "online"
