"""The forms of chained attention agree, in values and in gradients."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.attention import chained, chained_attention, kernels
from draftsmith.device import deterministic_algorithms

Chain = list[tuple[Tensor, Tensor]]


def _inputs(
    total: int, heads: int, kv_heads: int, steps: int, dim: int = 8, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Chain]:
    generator = torch.Generator().manual_seed(total + heads + steps)

    def draw(count: int) -> Tensor:
        return torch.randn(total, count, dim, generator=generator, dtype=dtype).requires_grad_(True)

    chain = [(draw(kv_heads), draw(kv_heads)) for _ in range(steps)]
    return draw(heads), draw(kv_heads), draw(kv_heads), chain


def _leaves(inputs: tuple[Tensor, Tensor, Tensor, Chain]) -> list[Tensor]:
    query, key, value, chain = inputs
    return [query, key, value, *(each for pair in chain for each in pair)]


def _run(inputs: tuple[Tensor, Tensor, Tensor, Chain], **options: object) -> list[Tensor]:
    query, key, value, chain = inputs
    output = chained_attention(query, key, value, chain, **options)  # type: ignore[arg-type]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    direction = direction.to(output.dtype)
    leaves = _leaves(inputs)
    gradients = torch.autograd.grad((output * direction).sum(), leaves, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]
    return [output.detach(), *filled]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("lengths", "total"), [([9], 9), ([5, 1, 7], 13), ([4, 0, 6], 12)])
def test_linear_equals_dense(
    lengths: list[int], total: int, heads: int, kv_heads: int, steps: int, window: int | None
) -> None:
    inputs = _inputs(total, heads, kv_heads, steps)
    dense = _run(inputs, document_lengths=lengths, window=window, form="dense")
    linear = _run(inputs, document_lengths=lengths, window=window, form="linear")
    for reference, result in zip(dense, linear, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("window", [3, 20, 30])
def test_tiles_of_a_windowed_document_agree(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(chained, "WINDOW_TILE", 8)
    inputs = _inputs(53, 4, 2, 2)
    dense = _run(inputs, document_lengths=[33, 20], window=window, form="dense")
    linear = _run(inputs, document_lengths=[33, 20], window=window, form="linear")
    for reference, result in zip(dense, linear, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-10)


def test_gradients_against_finite_differences() -> None:
    inputs = _inputs(7, 2, 1, 2, dim=4)

    def function(query: Tensor, key: Tensor, value: Tensor, *flat: Tensor) -> Tensor:
        chain = [(flat[2 * i], flat[2 * i + 1]) for i in range(len(flat) // 2)]
        return chained_attention(query, key, value, chain, document_lengths=[4, 2], window=4, form="linear")

    assert torch.autograd.gradcheck(function, tuple(_leaves(inputs)))


@pytest.mark.parametrize("window", [None, 3])
def test_float32_and_bfloat16(window: int | None) -> None:
    exact = _inputs(40, 4, 2, 2, dim=16)
    reference = _run(exact, document_lengths=[25, 15], window=window, form="dense")
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 6e-2)):
        query, key, value, chain = exact
        cast = tuple(each.detach().to(dtype).requires_grad_(True) for each in (query, key, value))
        cast_chain = [tuple(each.detach().to(dtype).requires_grad_(True) for each in pair) for pair in chain]
        results = _run((*cast, cast_chain), document_lengths=[25, 15], window=window, form="linear")  # type: ignore[arg-type]
        for expected, result in zip(reference, results, strict=True):
            assert result.dtype == dtype
            error = (result.double() - expected).norm() / expected.norm()
            assert error < tolerance


@pytest.mark.parametrize("window", [None, 3])
def test_flex_forward_equals_dense(window: int | None) -> None:
    # Flex attention has no backward pass on CPUs, so gradients are compared on GPUs only.
    inputs = _inputs(40, 4, 2, 2, dim=16, dtype=torch.float32)
    query, key, value = (each.detach() for each in inputs[:3])
    chain = [(k.detach(), v.detach()) for k, v in inputs[3]]
    results = [
        chained_attention(query, key, value, chain, document_lengths=[25, 13], window=window, form=form)  # type: ignore[arg-type]
        for form in ("dense", "flex")
    ]
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention's backward pass needs a GPU")
@pytest.mark.parametrize("form", ["linear", "flex"])
@pytest.mark.parametrize("window", [None, 3])
def test_all_forms_agree_on_a_gpu(form: str, window: int | None) -> None:
    query, key, value, chain = _inputs(300, 4, 2, 2, dim=64, dtype=torch.float32)
    leaves = tuple(each.detach().cuda().requires_grad_(True) for each in (query, key, value))
    cuda_chain = [tuple(each.detach().cuda().requires_grad_(True) for each in pair) for pair in chain]
    options = {"document_lengths": [170, 120], "window": window}
    direction = torch.randn(300, 4, 64, device="cuda")
    outcomes = []
    for each in ("dense", form):
        output = chained_attention(*leaves, cuda_chain, form=each, **options)  # type: ignore[arg-type]
        flat = [*leaves, *(tensor for pair in cuda_chain for tensor in pair)]
        outcomes.append([output, *torch.autograd.grad((output * direction).sum(), flat)])
    for reference, result in zip(*outcomes, strict=True):
        torch.testing.assert_close(result, reference, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", ["linear", "dense"])
def test_padding_gives_zeros_and_no_nan(form: str) -> None:
    output, *gradients = _run(_inputs(10, 4, 2, 2), document_lengths=[4, 3], window=None, form=form)
    assert output[7:].eq(0).all()
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert gradient[7:].eq(0).all()


@pytest.mark.parametrize("form", ["linear", "dense"])
@pytest.mark.parametrize("window", [None, 3])
def test_nothing_leaks(form: str, window: int | None) -> None:
    """A row's output has exactly zero gradient in later rows, other documents and other rows' chains."""
    inputs = _inputs(9, 2, 1, 2)
    query, key, value, chain = inputs
    output = chained_attention(query, key, value, chain, document_lengths=[5, 4], window=window, form=form)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(output[6].sum(), _leaves(inputs))
    seen = [[6], [5, 6], [5, 6], [6], [6], [6], [6]]
    if window == 3:  # position 1 + step 2 - window 3: nothing before position 1
        seen[1] = seen[2] = [6]
    for gradient, rows in zip(gradients, seen, strict=True):
        assert gradient.flatten(1).abs().sum(1).nonzero().flatten().tolist() == rows


def test_scale_is_that_of_the_head_dimension() -> None:
    query, key, value = torch.ones(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)
    key[1], value[1] = 1.0, 1.0
    output = chained_attention(query, key, value, document_lengths=[2])
    weight = math.exp(4 / 2) / (1 + math.exp(4 / 2))
    torch.testing.assert_close(output[1, 0], torch.full((4,), weight))


def test_misuse_is_an_error() -> None:
    query, key, value, _ = _inputs(4, 4, 2, 0)
    with pytest.raises(ValueError, match="do not fit"):
        chained_attention(query, key, value, document_lengths=[3, 2])
    with pytest.raises(ValueError, match="evenly"):
        chained_attention(query[:, :3], key, value, document_lengths=[4])
    with pytest.raises(ValueError, match="unknown attention form"):
        chained_attention(query, key, value, document_lengths=[4], form="magic")  # type: ignore[arg-type]


class _Flags(TorchDispatchMode):
    """Notes under which determinism every backward kernel of an accelerator is called."""

    def __init__(self) -> None:
        super().__init__()
        self.strict: dict[str, bool] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        if "attention" in name and name.endswith("_backward"):
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            self.strict[name] = torch.are_deterministic_algorithms_enabled() and not warn_only
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_of_accelerators_are_deterministic_where_that_is_asked_for(asked: bool) -> None:
    """With warn_only, which training sets, the fused kernels would only warn, and add up gradients in any order."""
    shape = (2, 1, 32, 64)
    mask = torch.zeros(32, 32, device="meta", dtype=torch.bfloat16)
    with deterministic_algorithms() if asked else contextlib.nullcontext(), _Flags() as flags:
        for bias in (None, mask):
            query, output, grad = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for _ in range(3))
            key, value = (torch.empty(shape[0], *shape[2:], device="meta", dtype=torch.bfloat16) for _ in range(2))
            lse = torch.empty(shape[:3], device="meta")
            kernels.kernel_backward(grad, query, key, value, output, lse, bias)
        assert torch.is_deterministic_algorithms_warn_only_enabled() == asked
    assert flags.strict == dict.fromkeys(
        [
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
        ],
        asked,
    )
