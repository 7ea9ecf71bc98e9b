"""The forms of continued attention agree, in values and in gradients; nothing leaks; memory stays linear."""

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

from draftsmith.attention import Continuations, chained_attention, continued, continued_attention

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention's backward pass needs a GPU")


def _leaves(
    continuations: Continuations,
    total: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    count = len(continuations)
    generator = torch.Generator().manual_seed(total + count + heads)
    shapes = [(count, heads), (total, kv_heads), (total, kv_heads), (count, kv_heads), (count, kv_heads)]
    return [torch.randn(*each, dim, generator=generator, dtype=dtype).requires_grad_(True) for each in shapes]


def _run(leaves: Sequence[Tensor], continuations: Continuations, **options: Any) -> list[Tensor]:
    output = continued_attention(*leaves, continuations, **options)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((output * direction.to(output)).sum(), leaves, allow_unused=True)
    return [
        output.detach(),
        *(torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)),
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Continuations, int]:
    """Chains, and T: documents of any length (none too), any of their rows continued by any number of steps."""
    documents = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    used = sum(documents)
    rows = sorted(draw(st.sets(st.integers(0, used - 1), max_size=8))) if used else []
    lengths = draw(st.lists(st.integers(1, 6), min_size=len(rows), max_size=len(rows)))
    continuations = Continuations(rows=rows, lengths=lengths, document_lengths=documents)
    return continuations, used + draw(st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(
    layout=layouts(),
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    window=st.none() | st.integers(1, 12),
    rows=st.integers(1, 20),
    elements=st.sampled_from([1, 100, 2**18]),
)
def test_linear_equals_dense(
    layout: tuple[Continuations, int], heads: tuple[int, int], window: int | None, rows: int, elements: int
) -> None:
    continuations, total = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continued, "TILE_ROWS", {"cpu": rows})
        patch.setattr(continued, "CHAIN_ELEMENTS", {"cpu": elements})
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            leaves = _leaves(continuations, total, *heads, dtype=dtype)
            dense = _run(leaves, continuations, window=window, form="dense")
            linear = _run(leaves, continuations, window=window, form="linear")
            for reference, result in zip(dense, linear, strict=True):
                torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance)


EXAMPLE = Continuations(rows=(0, 2, 3, 7, 20, 33), lengths=(4, 1, 2, 7, 3, 4), document_lengths=(6, 25, 9))


@pytest.mark.parametrize("window", [None, 3])
def test_bfloat16(window: int | None) -> None:
    leaves = _leaves(EXAMPLE, 42, dim=16)
    reference = _run(leaves, EXAMPLE, window=window, form="dense")
    cast = [each.detach().bfloat16().requires_grad_(True) for each in leaves]
    for expected, result in zip(reference, _run(cast, EXAMPLE, window=window), strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.double() - expected).norm() < 3e-2 * expected.norm()


@pytest.mark.parametrize("window", [None, 3])
def test_flex_forward_equals_dense(window: int | None) -> None:
    # Flex attention has no backward pass on CPUs, so gradients are compared on GPUs only.
    leaves = [each.detach() for each in _leaves(EXAMPLE, 42, dim=16, dtype=torch.float32)]
    dense, flex = (continued_attention(*leaves, EXAMPLE, window=window, form=form) for form in ("dense", "flex"))  # type: ignore[arg-type]
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


@GPU
@pytest.mark.parametrize("form", ["linear", "flex"])
@pytest.mark.parametrize("window", [None, 3])
def test_all_forms_agree_on_a_gpu(window: int | None, form: str) -> None:
    rows = range(3, 290, 3)
    continuations = Continuations(rows=rows, lengths=[1 + row % 7 for row in rows], document_lengths=(170, 120))
    leaves = [each.detach().cuda() for each in _leaves(continuations, 300, dim=64, dtype=torch.float32)]
    leaves = [each.requires_grad_(True) for each in leaves]
    reference, results = (_run(leaves, continuations, window=window, form=each) for each in ("dense", form))
    for expected, result in zip(reference, results, strict=True):
        torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("window", [None, 2, 5])
def test_it_is_what_a_draft_sees_step_by_step(window: int | None) -> None:
    """Every row continued by three steps, in one call and in three."""
    total, steps = 9, 3
    continuations = Continuations(rows=range(total), lengths=[steps] * total, document_lengths=(4, 5))
    query, *others = (each.detach() for each in _leaves(continuations, total))
    got = continued_attention(query, *others, continuations, window=window).view(total, steps, 4, 8)
    by_step = [each.view(total, steps, *each.shape[1:]).unbind(1) for each in (query, *others[2:])]
    for step in range(steps):
        chain = [(by_step[1][each], by_step[2][each]) for each in range(step + 1)]
        want = chained_attention(by_step[0][step], *others[:2], chain, document_lengths=(4, 5), window=window)
        torch.testing.assert_close(got[:, step], want)


@pytest.mark.parametrize("form", ["linear", "dense"])
@pytest.mark.parametrize(
    ("window", "real", "own"),
    [(None, [6, 7, 8], [2, 3]), (4, [7, 8], [2, 3]), (2, [], [2, 3]), (1, [], [3])],
)
def test_nothing_leaks(form: str, window: int | None, real: list[int], own: list[int]) -> None:
    """The second step after row 8 sees rows up to 8 of its document, and of the chains its own up to itself."""
    continuations = Continuations(rows=(7, 8, 9), lengths=(2, 3, 1), document_lengths=(6, 5))
    leaves = _leaves(continuations, 12)
    output = continued_attention(*leaves, continuations, window=window, form=form)  # type: ignore[arg-type]
    query, *others = torch.autograd.grad(output[3].sum(), leaves)
    # With itself alone to see, a softmax of one does not depend on the query, nor on the key.
    assert _nonzero_rows(query) == ([3] if window != 1 else [])
    for gradient, rows in zip(others, [real, real, own if window != 1 else [], own], strict=True):
        assert _nonzero_rows(gradient) == rows


def _nonzero_rows(tensor: Tensor) -> list[int]:
    return (tensor.flatten(1).abs().sum(1) > 1e-14).nonzero().flatten().tolist()


@pytest.mark.parametrize("form", ["linear", "dense", "flex"])
def test_no_chains_give_no_rows(form: str) -> None:
    continuations = Continuations(rows=(), lengths=(), document_lengths=(5,))
    leaves = _leaves(continuations, 5)
    output = continued_attention(*leaves, continuations, form=form)  # type: ignore[arg-type]
    assert output.shape == leaves[0].shape
    output.sum().backward()


def test_misuse_is_an_error() -> None:
    leaves = _leaves(EXAMPLE, 42)
    with pytest.raises(ValueError, match="have 21 rows, query 20"):
        continued_attention(leaves[0][1:], *leaves[1:], EXAMPLE)
    with pytest.raises(ValueError, match="do not fit"):
        continued_attention(leaves[0], leaves[1][:39], *leaves[2:], EXAMPLE)
    with pytest.raises(ValueError, match="evenly"):
        continued_attention(leaves[0][:, :3], *leaves[1:], EXAMPLE)
    with pytest.raises(ValueError, match="unknown attention form"):
        continued_attention(*leaves, EXAMPLE, form="magic")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": (3, 3)}, "ascend"),
        ({"rows": (4, 3)}, "ascend"),
        ({"rows": (3, 6)}, "do not lie"),
        ({"rows": (-1, 2)}, "do not lie"),
        ({"lengths": (1, 0)}, "at least one step"),
        ({"lengths": (1,)}, "2 rows are continued, and 1 lengths"),
    ],
)
def test_chains_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Continuations(**{"rows": (1, 2), "lengths": (1, 3), "document_lengths": (4, 2), **change})


PEAK = """
import sys, torch
from pathlib import Path
from draftsmith.attention import Continuations, continued_attention
total, count = 2048, int(sys.argv[1])
chains = Continuations(rows=range(total - count, total), lengths=[4] * count, document_lengths=(total,))
def step():
    rows = [(count * 4, 4), (total, 2), (total, 2), (count * 4, 2), (count * 4, 2)]
    leaves = [torch.randn(*each, 16, requires_grad=True) for each in rows]
    continued_attention(*leaves, chains, form=sys.argv[2]).sum().backward()
def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
before = memory("VmRSS")
step()
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a process from /proc")
def test_memory_does_not_grow_with_queries_times_context() -> None:
    """1024 chains of 4 on 2048 rows: scores of 4 heads would take 128 MiB, the dense form more than twice that."""

    def added(count: int, form: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(count), form], capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    assert added(1024, "linear") - added(64, "linear") < 24
    assert added(1024, "dense") > 256
