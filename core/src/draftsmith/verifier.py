"""What a verifier's own files say about it, read without torch.

Reads ``config.json`` (and ``generation_config.json``), checks that the weights are there and complete, and takes a
fingerprint of both. Nothing is executed and no tensor is loaded.

Conventions read here: flat configurations and those nested in ``text_config`` (vision-language models);
``rope_parameters`` (transformers 5) and ``rope_scaling`` / ``rope_theta`` (before); the many spellings of mixture of
experts. A configuration that leaves out keys which its class has defaults for (Gemma 3 is published so) is completed
by transformers in a child process, so that this process stays free of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from draftsmith.api import VerifierFacts
from draftsmith.errors import VerifierError
from draftsmith.interfaces import TensorSpec
from draftsmith.stored_tensors import unindexed_files

__all__ = ["read_verifier", "tensor_specs", "weight_files"]

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
}
_NORM_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
# Families whose head_dim default is not hidden_size / heads: a configuration without the key must be completed.
_OWN_HEAD_DIM = ("gemma", "qwen3")
_HEAD_TENSORS = ("lm_head.weight", "embed_out.weight", "output.weight")
_NOT_GENERATIVE = ("ForMaskedLM", "Classification", "QuestionAnswering", "ForPreTraining", "Encoder", "EncoderModel")
_PAGE = 4096
_PAGES = 2048  # sampled in all, over the whole model: some 8 MB of reads, whatever its size


@frozen
class _WeightFile:
    """A safetensors file: raw header bytes, tensor names, and [begin, end) of each tensor from the file's start."""

    path: Path
    size: int
    header: bytes
    spans: Mapping[str, tuple[int, int]]


def read_verifier(path: str | os.PathLike[str]) -> VerifierFacts:
    """Read the facts of the verifier in folder *path* (or in the local hub cache, where *path* is a hub name).

    Raises:
        VerifierError: missing, not a model, without (complete) safetensors weights, or a draft itself.
    """
    folder = _folder(path)
    config = _read_json(folder / "config.json")
    _refuse_what_is_no_verifier(folder, config)
    files = [_read_header(file) for file in weight_files(folder)]
    text = _text_config(config)
    if _is_incomplete(text):
        text = {**text, **_completed_by_transformers(folder, text)}
    return _facts(folder, config, text, files)


def tensor_specs(folder: Path) -> dict[str, TensorSpec]:
    """Name → shape and stored dtype of every tensor of a model, from the headers of its files.

    Raises:
        VerifierError: there are no (complete) safetensors weights.
    """
    found: dict[str, TensorSpec] = {}
    for path in weight_files(folder):
        for name, entry in json.loads(_read_header(path).header).items():
            if name != "__metadata__":
                found[name] = TensorSpec(shape=tuple(entry["shape"]), dtype=entry["dtype"])
    return found


# --- the folder -------------------------------------------------------------------------------------------------


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise VerifierError(
                "the folder holds no model: config.json is missing",
                where=str(folder),
                hint=_hint_without_config(folder),
            )
        return folder
    if folder.exists():
        raise VerifierError(
            "the verifier must be a folder, this is a file",
            where=str(folder),
            hint="name the folder with config.json, *.safetensors and the tokenizer",
        )
    cached = _cached_by_hub(str(path))
    if cached is not None:
        return cached
    looks_like_hub = str(path).count("/") == 1 and not str(path).startswith((".", "/", "~"))
    raise VerifierError(
        "there is no such verifier",
        where=str(path),
        hint=f"download it first (`hf download {path}`), or name the folder of a model"
        if looks_like_hub
        else "name the folder of a model: config.json, *.safetensors and the tokenizer",
    )


def _hint_without_config(folder: Path) -> str:
    names = {entry.name for entry in folder.iterdir()}
    if "adapter_config.json" in names:
        return "this is an adapter: merge it into its base model, and name the folder of the merged model"
    if any(name.endswith(".gguf") for name in names):
        return "GGUF files are not read: convert the model to safetensors with transformers first"
    if "snapshots" in names:
        return "this is the hub cache's folder: name the folder below snapshots/, or just the hub name"
    return "name the folder of a model: config.json, *.safetensors and the tokenizer"


def _cached_by_hub(name: str) -> Path | None:
    """The snapshot in the local hub cache, without asking the network: a mistyped name must fail at once."""
    if name.count("/") != 1:
        return None
    root = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface")), "hub"
    )
    repository = Path(root) / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise VerifierError(
            f"cannot be read as JSON: {error}", where=str(path), hint="download the model again"
        ) from error
    if not isinstance(value, dict):
        raise VerifierError("is not a JSON object", where=str(path), hint="download the model again")
    return value


def _refuse_what_is_no_verifier(folder: Path, config: Mapping[str, Any]) -> None:
    if "speculators_model_type" in config or "speculators_config" in config:
        raise VerifierError(
            "this checkpoint is a draft, not a verifier",
            where=str(folder),
            hint="name the model that it drafts for (speculators_config.verifier in its config.json)",
        )
    names = [str(name) for name in config.get("architectures") or ()]
    bare = [name for name in names if name.endswith("Model") and not name.endswith("LMHeadModel")]
    if names and all(name.endswith(_NOT_GENERATIVE) or name in bare for name in names):
        raise VerifierError(
            f"{names[0]} writes no text: it has no language model head",
            where=str(folder / "config.json"),
            hint="name the folder of a causal language model",
        )
    if "model_type" not in config:
        raise VerifierError(
            "config.json describes no model: it has no model_type",
            where=str(folder),
            hint="name the folder of a causal language model",
        )


# --- weights ----------------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, sorted by name: those of the index where it has one, else all.

    Raises:
        VerifierError: there are none, or the index names files that are not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise VerifierError("the index has no weight_map", where=str(index), hint="download the model again")
        files = tuple(folder / name for name in sorted(set(map(str, weight_map.values()))))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise VerifierError(
                f"{len(missing)} of {len(files)} weight files are missing, {missing[0]} among them",
                where=str(folder),
                hint="finish the download of the model",
            )
        return files
    if files := tuple(unindexed_files(folder)):
        return files
    pickled = sorted(file.name for file in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    raise VerifierError(
        "the folder has no safetensors weights" + (f" (only {pickled[0]}, a pickle)" if pickled else ""),
        where=str(folder),
        hint="convert it: load it with transformers and save_pretrained() it as safetensors"
        if pickled
        else "finish the download of the model",
    )


def _read_header(path: Path) -> _WeightFile:
    """Read and check a safetensors header: 8 bytes of length, JSON, then data up to the file's very end."""
    size = path.stat().st_size
    damaged = VerifierError(
        "the weight file is cut or damaged",
        where=str(path),
        hint="download the model again (is it a Git LFS pointer?)",
    )
    with open(path, "rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise damaged
        (length,) = struct.unpack("<Q", start)
        if length > size - 8:
            raise damaged
        header = file.read(length)
    try:
        entries = json.loads(header)
        spans = {
            name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise damaged from error
    if max((end for _, end in spans.values()), default=8 + length) != size:
        raise damaged
    return _WeightFile(path, size, header, spans)


def _sampled_pages(file: _WeightFile, pages: int) -> Iterator[bytes]:
    """One page from the middle of each tensor, or of *pages* tensors evenly chosen; small tensors come whole."""
    spans = sorted(file.spans.values())
    stride = max(1, -(-len(spans) // pages))
    with open(file.path, "rb") as handle:
        for begin, end in spans[::stride]:
            offset = begin if end - begin <= _PAGE else begin + (end - begin - _PAGE) // 2
            handle.seek(offset)
            yield handle.read(min(_PAGE, end - begin))


def _fingerprint(config: Mapping[str, Any], generation: Mapping[str, Any], files: Sequence[_WeightFile]) -> str:
    """Hex digest over configuration and weights: sizes, headers, and pages sampled from the tensors.

    Any training step moves every tensor, so that a page of each tells two models apart without reading 100 GB.
    """
    volatile = ("_name_or_path", "transformers_version")
    hasher = hashlib.sha256()
    for part in (config, generation):
        plain = {key: value for key, value in part.items() if key not in volatile}
        hasher.update(json.dumps(plain, sort_keys=True).encode())
    for file in files:
        hasher.update(f"{file.path.name}\0{file.size}\0".encode())
        hasher.update(file.header)
        for page in _sampled_pages(file, max(16, _PAGES // len(files))):
            hasher.update(page)
    return hasher.hexdigest()[:32]


# --- configuration ----------------------------------------------------------------------------------------------


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's own keys, over those that only the outer level has."""
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, dict):
            outer = {name: value for name, value in config.items() if name not in _NESTED and not _is_tower(value)}
            return {**outer, **_text_config(nested)}
    return dict(config)


def _is_tower(value: Any) -> bool:
    """A nested configuration of another modality, which the text model's facts must not inherit."""
    return isinstance(value, dict) and "model_type" in value


def _get(text: Mapping[str, Any], key: str) -> Any:
    for name in _ALIASES.get(key, (key,)):
        if text.get(name) is not None:
            return text[name]
    return None


def _is_incomplete(text: Mapping[str, Any]) -> bool:
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    own_head_dim = str(text.get("model_type", "")).startswith(_OWN_HEAD_DIM) and text.get("head_dim") is None
    return own_head_dim or any(_get(text, key) is None for key in needed)


_COMPLETE = """
import json, sys
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1])
print("\\n" + json.dumps(config.get_text_config().to_dict(), default=str))
"""


def _completed_by_transformers(folder: Path, text: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its class's defaults, from a child process that may import what it likes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPLETE, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    try:
        completed = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        missing = [key for key in _ALIASES if _get(text, key) is None] or ["head_dim"]
        reason = done.stderr.strip().splitlines()[-1:] or ["no answer"]
        raise VerifierError(
            f"config.json lacks {', '.join(missing)}, and transformers cannot complete it ({reason[0]})",
            where=str(folder / "config.json"),
            hint="name the folder of a causal language model that the installed transformers knows",
        ) from None
    return {key: value for key, value in completed.items() if text.get(key) is None and value is not None}


def _rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict with ``rope_type`` and ``rope_theta``, from either spelling.

    Where layer types have their own tables, full attention's is taken. Multimodal sections are left out: with text
    alone all sections carry the same position, and the table is the plain one.
    """
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = text.get(key)
        if isinstance(value, dict):
            nested = value.get("full_attention")
            found.update(nested if isinstance(nested, dict) else value)
    legacy = found.pop("type", None)
    rope_type = found.get("rope_type") or legacy or "default"
    found["rope_type"] = "default" if rope_type == "mrope" else rope_type
    for key in ("mrope_section", "mrope_interleaved"):
        found.pop(key, None)
    if found.get("rope_theta") is None:
        found["rope_theta"] = float(text.get("rope_theta") or text.get("rotary_emb_base") or 10000.0)
    for key in ("partial_rotary_factor", "rotary_pct"):
        if text.get(key) is not None:
            found.setdefault("partial_rotary_factor", text[key])
    return found


def _logit_scale(text: Mapping[str, Any]) -> float:
    """Families that scale logits: Cohere multiplies, Granite divides, Falcon-H1 has a multiplier of its own."""
    if text.get("logit_scale") is not None:
        return float(text["logit_scale"])
    if text.get("logits_scaling") is not None:
        return 1.0 / float(text["logits_scaling"])
    if text.get("lm_head_multiplier") is not None:
        return float(text["lm_head_multiplier"])
    return 1.0


def _is_tied(text: Mapping[str, Any], files: Sequence[_WeightFile]) -> bool:
    """As configured; a model whose files have no head at all is tied whatever its configuration leaves out."""
    names = [name for file in files for name in file.spans]
    if not any(name.endswith(_HEAD_TENSORS) for name in names):
        return True
    return bool(text.get("tie_word_embeddings", False))


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Distinct token ids of keys that hold an id, a list of ids, or nothing; in order."""
    found: dict[int, None] = {}
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and not isinstance(each, bool):
                found[each] = None
    return tuple(found)


def _facts(
    folder: Path, config: Mapping[str, Any], text: Mapping[str, Any], files: Sequence[_WeightFile]
) -> VerifierFacts:
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    try:
        hidden, heads = int(_get(text, "hidden_size")), int(_get(text, "num_attention_heads"))
        return VerifierFacts(
            path=folder,
            fingerprint=_fingerprint(config, generation, files),
            architectures=tuple(config.get("architectures") or ()),
            model_type=str(text.get("model_type", config["model_type"])),
            hidden_size=hidden,
            num_layers=int(_get(text, "num_hidden_layers")),
            num_attention_heads=heads,
            num_key_value_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate_size=int(_get(text, "intermediate_size") or 4 * hidden),
            vocab_size=int(_get(text, "vocab_size")),
            rms_norm_eps=float(_first(text, *_NORM_EPS) or 1e-6),
            max_position_embeddings=int(_first(text, "max_position_embeddings", "n_positions") or 2048),
            rope_parameters=_rope_parameters(text),
            tie_word_embeddings=_is_tied(text, files),
            is_mixture_of_experts=any(isinstance(text.get(key), int) and text[key] > 1 for key in _EXPERTS),
            hidden_act=str(_first(text, "hidden_act", "hidden_activation", "activation_function") or "silu"),
            attention_bias=bool(text.get("attention_bias", False)),
            bos_token_id=next(iter(_token_ids(text.get("bos_token_id"), generation.get("bos_token_id"))), None),
            eos_token_ids=_token_ids(generation.get("eos_token_id"), text.get("eos_token_id")),
            pad_token_id=next(iter(_token_ids(generation.get("pad_token_id"), text.get("pad_token_id"))), None),
            logit_softcap=_positive(text.get("final_logit_softcapping")),
            logit_scale=_logit_scale(text),
            text_config=dict(text),
        )
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise VerifierError(
            f"config.json is not that of a causal language model: {error}",
            where=str(folder / "config.json"),
            hint="name the folder of a causal language model",
        ) from error


def _first(text: Mapping[str, Any], *keys: str) -> Any:
    return next((text[key] for key in keys if text.get(key) is not None), None)


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
