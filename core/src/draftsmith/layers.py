"""Building blocks of draft networks, shared by all algorithms: norms, rotary embedding, attention, feed-forward.

Modules hold float32 master parameters under the names that vLLM's loaders expect (``self_attn.q_proj`` …). The
forward passes of training take *fused* weights (:class:`AttentionWeights`, :class:`MlpWeights`): cast once to the
compute dtype and concatenated once per row, however many steps use them.

Shapes: T rows, H width, q query heads · head_dim, kv key/value heads · head_dim, I intermediate width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.interfaces import VerifierWeights, VocabularyMap
from draftsmith.layer_config import LayerConfig

__all__ = [
    "Attention",
    "AttentionWeights",
    "Mlp",
    "MlpWeights",
    "RMSNorm",
    "RotaryEmbedding",
    "RotaryTable",
    "Weight",
    "draft_head",
    "initialise",
    "rms_norm",
    "rotate",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last dimension; float32 inside, dtype of *x* outside (as vLLM's kernel)."""
    normed: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and one number a row for the backward pass; composed of torch operations it keeps thrice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight = grad_x = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            # d/dx of x·s(x): the part along x vanishes, since the norm is invariant to its length.
            grad_x = grad * weight
            along = (grad_x * normed).mean(-1, keepdim=True)
            grad_x = grad_x.sub_(normed.mul_(along)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


class RMSNorm(nn.Module):
    """Root-mean-square norm that scales by its weight [dim], initialised to one."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RotaryTable(NamedTuple):
    """cos and sin of some positions, each float32 [T, head_dim]."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Rotary tables over the whole head, with the frequencies that transformers computes for the rope type.

    Source: RoFormer (arXiv 2104.09864); scalings as in ``transformers.modeling_rope_utils``.
    """

    inverse_frequency: Tensor

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        frequencies, self.scaling = _inverse_frequencies(config)
        self.register_buffer("inverse_frequency", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> RotaryTable:
        """Tables of int64 *positions* [T]."""
        angles = positions[:, None].float() * self.inverse_frequency.float()
        angles = torch.cat((angles, angles), dim=-1)
        return RotaryTable(angles.cos() * self.scaling, angles.sin() * self.scaling)


def _inverse_frequencies(config: LayerConfig) -> tuple[Tensor, float]:
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (float(rope["rope_theta"]) ** exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = LlamaConfig(
        # The tables depend on head_dim alone, and transformers refuses a width that the heads do not divide.
        hidden_size=config.query_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate x [T, heads, head_dim] (halves convention of Llama and NeoX); float32 inside, dtype of *x* outside."""
    turned: Tensor = _Rotate.apply(x, table.cos, table.sin)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """Keeps nothing but the table: the backward pass is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    # Both halves of a table are equal.
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    first, second = x[..., :half].to(cos.dtype), x[..., half:].to(cos.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
    out[..., half:] = (second * cos).addcmul_(first, sin)
    return out


class AttentionWeights(NamedTuple):
    """Projections in the compute dtype: qkv [q + 2 kv, in], o [H, q]; norms per head [head_dim] or None; the biases of
    qkv [q + 2 kv] or None."""

    qkv: Tensor
    o: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None = None


class Attention(nn.Module):
    """Projections of one attention layer, llama- or qwen3-style; *who sees whom* is the algorithm's business.

    Args:
        config: sizes.
        input_size: width of the projections' input, where it is not the hidden size.
        bias: queries, keys and values have biases, as in qwen2.
    """

    def __init__(self, config: LayerConfig, input_size: int | None = None, *, bias: bool = False) -> None:
        super().__init__()
        self.config = config
        width = input_size or config.hidden_size
        self.q_proj = nn.Linear(width, config.query_size, bias=bias)
        self.k_proj = nn.Linear(width, config.key_value_size, bias=bias)
        self.v_proj = nn.Linear(width, config.key_value_size, bias=bias)
        self.o_proj = nn.Linear(config.query_size, config.hidden_size, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.layer_type == "qwen3":
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def fused(self, dtype: torch.dtype) -> AttentionWeights:
        """Weights for this forward pass; gradients reach the parameters."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        has_bias = self.q_proj.bias is not None
        return AttentionWeights(
            torch.cat([each.weight for each in projections]).to(dtype),
            self.o_proj.weight.to(dtype),
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            torch.cat([each.bias for each in projections]).to(dtype) if has_bias else None,
        )

    def query(self, projected: Tensor, weights: AttentionWeights, table: RotaryTable) -> Tensor:
        """Queries [T, heads, head_dim] from their projection [T, q]: norm per head, then rotation."""
        query = projected.reshape(-1, self.config.num_attention_heads, self.config.head_dim)
        if weights.q_norm is not None:
            query = rms_norm(query, weights.q_norm, self.config.rms_norm_eps)
        return rotate(query, table)

    def key_value(self, projected: Tensor, weights: AttentionWeights, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """Keys and values [T, kv_heads, head_dim] from their projection [T, 2 kv]."""
        key, value = projected.reshape(-1, 2, self.config.num_key_value_heads, self.config.head_dim).unbind(1)
        if weights.k_norm is not None:
            key = rms_norm(key, weights.k_norm, self.config.rms_norm_eps)
        return rotate(key, table), value


class MlpWeights(NamedTuple):
    """Projections in the compute dtype: gate and up [2 I, H], down [H, I]."""

    gate_up: Tensor
    down: Tensor


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)). Source: arXiv 2002.05202."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def fused(self, dtype: torch.dtype) -> MlpWeights:
        """Weights for this forward pass; gradients reach the parameters."""
        return MlpWeights(
            torch.cat((self.gate_proj.weight, self.up_proj.weight)).to(dtype), self.down_proj.weight.to(dtype)
        )

    @staticmethod
    def apply_fused(x: Tensor, weights: MlpWeights) -> Tensor:
        """SwiGLU of x [T, H] with fused weights."""
        gate_up = F.linear(x, weights.gate_up)
        output: Tensor = _GatedDown.apply(gate_up, weights.down)  # type: ignore[no-untyped-call]
        return output

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_fused(x, self.fused(x.dtype))


class _GatedDown(torch.autograd.Function):
    """down(silu(gate) · up) of [T, 2 I], that keeps its input for the backward pass and not the product [T, I]."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, down)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, down = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_input = grad_down = None
        active = F.silu(gate)
        if ctx.needs_input_grad[1]:
            grad_down = grad.t() @ (active * up)
        if ctx.needs_input_grad[0]:
            product = grad @ down
            grad_input = torch.empty_like(gate_up)
            grad_gate, grad_up = grad_input.chunk(2, dim=-1)
            torch.mul(active, product, out=grad_up)
            torch.ops.aten.silu_backward(product.mul_(up), gate, grad_input=grad_gate)
        return grad_input, grad_down


class Weight(nn.Module):
    """A matrix under the name that its module has in the verifier: the verifier's, frozen, or the draft's own."""

    def __init__(self, weight: Tensor, *, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trained)


def draft_head(weights: VerifierWeights, vocabulary: VocabularyMap, compute_dtype: torch.dtype) -> Tensor:
    """The verifier's head restricted to the draft vocabulary [V_d, H_t], in a dtype that loses nothing.

    That is the compute dtype where the verifier stores it so, else float32; the tensor itself where nothing changes.
    """
    head = weights.lm_head.detach()
    if not vocabulary.is_identity:
        head = head[vocabulary.kept_ids().to(head.device)]
    return head if head.dtype == compute_dtype else head.float()


def initialise(module: nn.Module, std: float) -> None:
    """Normal(0, *std*) for every matrix that is trained, from torch's global generator, in the order of the names.

    Norms keep their ones. Frozen parameters are left as they are.
    """
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            if parameter.requires_grad and parameter.dim() >= 2:
                parameter.normal_(0.0, std)
