"""A recurrent draft as vLLM 0.32 runs it. Importing this imports torch; vLLM, when a network is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ServedDraft"]


class ServedDraft(nn.Module, ABC):
    """What vLLM's proposers ask of a network that is handed tokens and the states before them: x_{t+1} beside the
    verifier's hidden state of x_t after its final norm; then, step by step, its own tokens and states.

    Name the class that derives from it in ``api.Algorithm.vllm_network``. Embedding and head are the verifier's: vLLM
    puts them there, since nothing here says ``has_own_embed_tokens`` or ``has_own_lm_head``.
    """

    lm_head: nn.Module

    @abstractmethod
    def build_step(self, config: Mapping[str, Any]) -> nn.Module:
        """The step that was trained, fresh; *config* is the exported config.json."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        super().__init__()
        draft = vllm_config.speculative_config.draft_model_config
        self.model = _Inner(self.build_step(draft.hf_config.exported_config))
        self.logits_processor = LogitsProcessor(vllm_config.model_config.get_vocab_size())
        # vLLM's proposer takes a draft with a cache of its own for granted. Nobody calls the layer that has it.
        self.unused = Attention(
            draft.get_num_attention_heads(vllm_config.parallel_config),
            draft.get_head_size(),
            scale=1.0,
            num_kv_heads=draft.get_num_kv_heads(vllm_config.parallel_config),
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix or 'draft'}.layers.{vllm_config.model_config.get_total_num_hidden_layers()}.unused",
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """int64 [n] → [n, H]."""
        embedded: Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [n] and the states before them [n, H] → what the head reads, and what is fed back, [n, H] each."""
        embedded = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        output, state = self.model.step(embedded, hidden_states)
        return output, state

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[n, H] → [n, V_t]."""
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The step's tensors; an exported embedding is the verifier's, which vLLM shares. Names of what was loaded."""
        from vllm.model_executor.models.utils import AutoWeightsLoader

        named = ((f"model.{name}", weight) for name, weight in weights if name.startswith("step."))
        loaded: set[str] = AutoWeightsLoader(self).load_weights(named)
        return loaded


class _Inner(nn.Module):
    """What vLLM looks for under ``model``: it puts the verifier's ``embed_tokens`` here."""

    embed_tokens: nn.Module

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step
