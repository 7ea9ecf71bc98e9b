"""The forms of anchored attention agree, in values and in gradients; nothing leaks; memory stays linear."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftsmith.attention import AnchoredBlocks, anchored, anchored_attention

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention's backward pass needs a GPU")


def _leaves(
    blocks: AnchoredBlocks,
    total: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(total + len(blocks) + heads)
    slots = len(blocks) * blocks.block_size
    shapes = [(slots, heads), (total, kv_heads), (total, kv_heads), (slots, kv_heads), (slots, kv_heads)]
    return [torch.randn(*each, dim, generator=generator, dtype=dtype).requires_grad_(True) for each in shapes]


def _run(leaves: Sequence[Tensor], blocks: AnchoredBlocks, **options: Any) -> list[Tensor]:
    output = anchored_attention(*leaves, blocks, **options)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((output * direction.to(output)).sum(), leaves, allow_unused=True)
    return [
        output.detach(),
        *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)),
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[AnchoredBlocks, int]:
    """Blocks, and T: documents of any length (none too), anchors anywhere in them, the first row too."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    used = sum(lengths)
    anchors = draw(st.sets(st.integers(0, used - 1), max_size=8)) if used else set()
    size = draw(st.integers(1, 6))
    blocks = AnchoredBlocks(anchors=sorted(anchors), document_lengths=lengths, block_size=size)
    return blocks, used + draw(st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts(),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    window=st.none() | st.integers(1, 12),
    causal=st.booleans(),
    rows=st.integers(1, 20),
)
def test_linear_equals_dense(
    layout: tuple[AnchoredBlocks, int], heads: tuple[int, int], window: int | None, causal: bool, rows: int
) -> None:
    blocks, total = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchored, "TILE_ROWS", {"cpu": rows})
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            leaves = _leaves(blocks, total, *heads, dtype=dtype)
            dense = _run(leaves, blocks, window=window, causal=causal, form="dense")
            linear = _run(leaves, blocks, window=window, causal=causal, form="linear")
            for reference, result in zip(dense, linear, strict=True):
                torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance)


EXAMPLE = AnchoredBlocks(anchors=(0, 2, 3, 7, 20, 33), document_lengths=(6, 25, 9), block_size=4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_bfloat16(window: int | None, causal: bool) -> None:
    leaves = _leaves(EXAMPLE, 42, dim=16)
    reference = _run(leaves, EXAMPLE, window=window, causal=causal, form="dense")
    cast = [each.detach().bfloat16().requires_grad_(True) for each in leaves]
    for expected, result in zip(reference, _run(cast, EXAMPLE, window=window, causal=causal), strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.double() - expected).norm() < 3e-2 * expected.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_flex_forward_equals_dense(window: int | None, causal: bool) -> None:
    # Flex attention has no backward pass on CPUs, so gradients are compared on GPUs only.
    leaves = [each.detach() for each in _leaves(EXAMPLE, 42, dim=16, dtype=torch.float32)]
    dense, flex = (
        anchored_attention(*leaves, EXAMPLE, window=window, causal=causal, form=form)  # type: ignore[arg-type]
        for form in ("dense", "flex")
    )
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


@GPU
@pytest.mark.parametrize("form", ["linear", "flex"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_all_forms_agree_on_a_gpu(window: int | None, causal: bool, form: str) -> None:
    blocks = AnchoredBlocks(anchors=range(3, 290, 7), document_lengths=(170, 120), block_size=8)
    leaves = [each.detach().cuda() for each in _leaves(blocks, 300, dim=64, dtype=torch.float32)]
    leaves = [each.requires_grad_(True) for each in leaves]
    reference, results = (_run(leaves, blocks, window=window, causal=causal, form=each) for each in ("dense", form))
    for expected, result in zip(reference, results, strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("form", ["linear", "dense"])
@pytest.mark.parametrize(
    ("window", "causal", "context", "slots"),
    [
        (None, False, [6, 7], [0, 1, 2]),
        (None, True, [6, 7], [0, 1]),
        (3, False, [7], [0, 1, 2]),
        (2, True, [], [0, 1]),
    ],
)
def test_nothing_leaks(form: str, window: int | None, causal: bool, context: list[int], slots: list[int]) -> None:
    """The second slot of an anchor at row 8 sees rows before 8 of its document, and of the blocks its own, exactly."""
    blocks = AnchoredBlocks(anchors=(7, 8, 9), document_lengths=(6, 5), block_size=3)
    leaves = _leaves(blocks, 12)
    output = anchored_attention(*leaves, blocks, window=window, causal=causal, form=form)  # type: ignore[arg-type]
    query, *others = torch.autograd.grad(output[4].sum(), leaves)
    assert _nonzero_rows(query) == [4]
    for gradient, rows in zip(others, [context, context, *[[3 + each for each in slots]] * 2], strict=True):
        assert _nonzero_rows(gradient) == rows


def _nonzero_rows(tensor: Tensor) -> list[int]:
    return tensor.flatten(1).abs().sum(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("form", ["linear", "dense", "flex"])
def test_an_anchor_without_context_sees_its_block(form: str) -> None:
    blocks = AnchoredBlocks(anchors=(4,), document_lengths=(4, 3), block_size=2)
    leaves = [each.detach() for each in _leaves(blocks, 7, dim=16, dtype=torch.float32)]
    output = anchored_attention(*leaves, blocks, form=form)  # type: ignore[arg-type]
    alone = AnchoredBlocks(anchors=(0,), document_lengths=(1,), block_size=2)
    leaves[1:3] = [torch.zeros(1, 2, 16)] * 2
    torch.testing.assert_close(output, anchored_attention(*leaves, alone, form="dense"))


@pytest.mark.parametrize("form", ["linear", "dense", "flex"])
def test_no_anchors_give_no_rows(form: str) -> None:
    blocks = AnchoredBlocks(anchors=(), document_lengths=(5,), block_size=4)
    leaves = _leaves(blocks, 5)
    output = anchored_attention(*leaves, blocks, form=form)  # type: ignore[arg-type]
    assert output.shape == leaves[0].shape
    output.sum().backward()


def test_misuse_is_an_error() -> None:
    leaves = _leaves(EXAMPLE, 42)
    with pytest.raises(ValueError, match="have 24 rows, query 23"):
        anchored_attention(leaves[0][1:], *leaves[1:], EXAMPLE)
    with pytest.raises(ValueError, match="do not fit"):
        anchored_attention(leaves[0], leaves[1][:39], *leaves[2:], EXAMPLE)
    with pytest.raises(ValueError, match="evenly"):
        anchored_attention(leaves[0][:, :3], *leaves[1:], EXAMPLE)
    with pytest.raises(ValueError, match="unknown attention form"):
        anchored_attention(*leaves, EXAMPLE, form="magic")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchors": (3, 3)}, "ascend"),
        ({"anchors": (4, 3)}, "ascend"),
        ({"anchors": (3, 6)}, "do not lie"),
        ({"anchors": (-1,)}, "do not lie"),
        ({"block_size": 0}, "at least one slot"),
    ],
)
def test_blocks_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnchoredBlocks(**{"anchors": (1,), "document_lengths": (4, 2), "block_size": 3, **change})


PEAK = """
import sys, torch
from pathlib import Path
from draftsmith.attention import AnchoredBlocks, anchored_attention
total, count = 2048, int(sys.argv[1])
blocks = AnchoredBlocks(anchors=range(total - count, total), document_lengths=(total,), block_size=4)
def step():
    rows = [(count * 4, 4), (total, 2), (total, 2), (count * 4, 2), (count * 4, 2)]
    leaves = [torch.randn(*each, 16, requires_grad=True) for each in rows]
    anchored_attention(*leaves, blocks, form=sys.argv[2]).sum().backward()
def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
AnchoredBlocks(anchors=(1,), document_lengths=(2,), block_size=1)
before = memory("VmRSS")
step()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
def test_memory_does_not_grow_with_queries_times_context() -> None:
    """1024 blocks of 4 on 2048 rows: scores of 4 heads would take 128 MiB, the dense form more than twice that."""

    def added(count: int, form: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(count), form], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    assert added(1024, "linear") - added(64, "linear") < 24
    assert added(1024, "dense") > 256
