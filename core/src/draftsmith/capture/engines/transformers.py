"""The verifier in this process, by transformers, with hooks where the residual stream passes.

Convention of layer ids (vLLM's ``eagle_aux_hidden_state_layer_ids``): id i < n is what enters decoder layer i, so
that id 0 is the embedding as the first layer sees it (scaled, where a family scales it); id n is what enters the
final norm. transformers' own ``output_hidden_states`` gives the last one *after* the norm, hence the hooks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from draftsmith.api import VerifierFacts
from draftsmith.capture.engines import CaptureEngine, CaptureSetup, Done, Request, batches_by_length
from draftsmith.capture.finite import refusal
from draftsmith.device import fast_bfloat16, resolve_device
from draftsmith.errors import VerifierError
from draftsmith.interfaces import HiddenStateSample, HiddenStateWriter
from draftsmith.verifier_weights import BUILDING

__all__ = [
    "Decoder",
    "TransformersEngine",
    "find_decoder",
    "hidden_states",
    "load_verifier",
    "own_dtype",
    "verifier_dtype",
]

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_f")


@frozen
class Decoder:
    """The parts of a causal language model that matter here.

    Attributes:
        module: the text model without its head; called with ``input_ids``.
        layers: its n decoder layers.
        norm: its final norm.
    """

    module: nn.Module
    layers: Sequence[nn.Module]
    norm: nn.Module


def find_decoder(model: nn.Module) -> Decoder:
    """Find decoder layers and final norm of *model*, whatever wraps them.

    The text model is the module that owns a token embedding, a list of as many layers as the configuration says,
    and a norm, side by side.

    Raises:
        VerifierError: there is no such module, or more than one.
    """
    config: Any = model.config
    text = config.get_text_config()
    found: list[Decoder] = []
    for module in model.modules():
        children = dict(module.named_children())
        layers = [
            child
            for child in children.values()
            if isinstance(child, nn.ModuleList) and len(child) == text.num_hidden_layers
        ]
        norms = [children[name] for name in _NORMS if name in children]
        if len(layers) == 1 and len(norms) == 1 and any(name in children for name in _EMBEDDINGS):
            found.append(Decoder(module, list(layers[0]), norms[0]))
    if len(found) != 1:
        raise VerifierError(
            f"{type(model).__name__}: {'no' if not found else 'more than one'} module has an embedding, "
            f"{text.num_hidden_layers} decoder layers and a final norm side by side",
            hint="capture this verifier with engine: vllm",
        )
    return found[0]


class _Taps:
    """Pre-hooks that keep what enters the tapped modules during one forward pass."""

    def __init__(self, decoder: Decoder, layer_ids: Sequence[int]) -> None:
        count = len(decoder.layers)
        self._layer_ids = layer_ids
        self._places = {each: decoder.norm if each == count else decoder.layers[each] for each in layer_ids}
        self.states: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[_Taps]:
        handles = [
            module.register_forward_pre_hook(self._keep(layer_id), with_kwargs=True)
            for layer_id, module in self._places.items()
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer_id: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            state = arguments[0] if arguments else keywords["hidden_states"]
            self.states[layer_id] = state

        return hook

    def stacked(self) -> Tensor:
        """[B, T, ids, H_t], in the order of the ids."""
        return torch.stack([self.states[each] for each in self._layer_ids], dim=2)


def hidden_states(model: nn.Module, token_ids: Tensor, mask: Tensor | None, layer_ids: Sequence[int]) -> Tensor:
    """The residual stream of every token at *layer_ids*.

    Args:
        model: a causal language model of transformers, or its text model.
        token_ids: int64 [B, T], padded on the right.
        mask: bool [B, T], False at padding; None where there is none.
        layer_ids: ids in [0, n], in the order wanted.

    Returns:
        [B, T, len(layer_ids), H_t] in the model's dtype, on its device. Values at padding mean nothing.

    Raises:
        VerifierError: an id is out of range, or the model's layers are not found.
    """
    decoder = find_decoder(model)
    if not all(0 <= each <= len(decoder.layers) for each in layer_ids):
        raise VerifierError(f"layer ids {list(layer_ids)} are not all within 0 and {len(decoder.layers)}")
    attention = None if mask is None or bool(mask.all()) else mask.to(torch.int64)
    with torch.inference_mode(), _Taps(decoder, layer_ids).attached() as taps:
        decoder.module(input_ids=token_ids, attention_mask=attention, use_cache=False)
        return taps.stacked()


def own_dtype(facts: VerifierFacts) -> torch.dtype | None:
    """The dtype that the verifier was published in, as its configuration says."""
    name = facts.text_config.get("dtype") or facts.text_config.get("torch_dtype")
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def verifier_dtype(name: str, own: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The compute dtype: *name*, or for ``auto`` the verifier's *own* where the device is fast at it, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if own in (torch.bfloat16, torch.float16) and fast_bfloat16(device):
        return own
    return torch.float32


def load_verifier(
    path: Any, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> nn.Module:
    """The verifier, ready for inference. What its files hold beyond its layers, such as a native head, is left there.

    Raises:
        VerifierError: transformers cannot load it, or would make up weights that its files do not hold.
    """
    import transformers

    arguments: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, "local_files_only": True}
    arguments["output_loading_info"] = True
    try:
        with BUILDING, _loading_quietly():
            try:
                model, found = transformers.AutoModelForCausalLM.from_pretrained(path, **arguments)
            except ValueError:  # a configuration that is not registered as a causal language model
                model, found = transformers.AutoModelForImageTextToText.from_pretrained(path, **arguments)
    except (ValueError, OSError, KeyError, ImportError, RuntimeError) as error:
        raise VerifierError(
            f"transformers cannot load the verifier: {str(error).strip().splitlines()[0]}",
            where=str(path),
            hint="use engine: vllm, or set trust_remote_code where the model's own code comes along",
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise VerifierError(
            f"{len(missing)} weights of the verifier are not in its files, such as {missing[0]}",
            where=str(path),
            hint="is every shard there, and config.json this model's?",
        )
    module: nn.Module = model.eval().requires_grad_(False).to(device)
    return module


@contextlib.contextmanager
def _loading_quietly() -> Iterator[None]:
    """Without transformers' table of tensors that are missing (an error here) or left over (of no consequence)."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class TransformersEngine(CaptureEngine):
    """Runs batches of similar length through the verifier in this process."""

    def __init__(self, setup: CaptureSetup, open_writer: Callable[[], HiddenStateWriter]) -> None:
        self._setup = setup
        self._open_writer = open_writer
        self._writer: HiddenStateWriter | None = None
        self._model: nn.Module | None = None
        self._device = resolve_device("auto")
        self._dtype = verifier_dtype(setup.dtype, own_dtype(setup.verifier), self._device)
        self._store_dtype: torch.dtype = getattr(torch, setup.layout.dtype)

    @property
    def compute_dtype(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def __enter__(self) -> TransformersEngine:
        self._model = load_verifier(
            self._setup.verifier.path,
            dtype=self._dtype,
            device=self._device,
            trust_remote_code=self._setup.trust_remote_code,
        )
        find_decoder(self._model)
        self._writer = self._open_writer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def capture(self, requests: Iterable[Request]) -> Iterator[Done]:
        for batch in batches_by_length(requests, self._setup.batch_tokens):
            yield self._capture_batch(batch)

    def _capture_batch(self, batch: Sequence[Request]) -> Done:
        assert self._model is not None
        assert self._writer is not None
        started = time.monotonic()
        lengths = [len(request.token_ids) for request in batch]
        token_ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
        mask = torch.zeros(len(batch), max(lengths), dtype=torch.bool)
        for row, request in enumerate(batch):
            token_ids[row, : lengths[row]] = torch.as_tensor(request.token_ids)
            mask[row, : lengths[row]] = True
        states = hidden_states(
            self._model, token_ids.to(self._device), mask.to(self._device), self._setup.layout.layer_ids
        )
        states = states.to(self._store_dtype).cpu()
        stored: list[str] = []
        refused: dict[str, str] = {}
        for row, request in enumerate(batch):
            sample = HiddenStateSample(
                sample_id=request.sample_id,
                token_ids=token_ids[row, : lengths[row]],
                hidden_states=states[row, : lengths[row]],
            )
            reason = refusal(sample.hidden_states)
            if reason is not None:
                refused[request.sample_id] = reason
                continue
            self._writer.put(sample)
            stored.append(request.sample_id)
        self._writer.flush()
        seconds = time.monotonic() - started
        return Done(stored=tuple(stored), refused=refused, tokens=sum(lengths), seconds=seconds)
