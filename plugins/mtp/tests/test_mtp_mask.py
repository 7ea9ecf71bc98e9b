"""The two masks: vLLM's cache, and FastMTP's, step by step, against the scheme as the paper has it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from make_mimo import add_head
from torch import Tensor

from draftsmith.errors import ConfigError
from draftsmith.masks.forms import concatenate_slots, dense_mask, document_slots, step_slots
from draftsmith.masks.rules import Causal, Chained
from draftsmith.testing.algorithm import AlgorithmCase, Material, make_material, slot_logits, tiny_case
from draftsmith_mtp.mask import StepByStep, chain_attention, continues_all
from draftsmith_mtp.model import MtpDraft


def drawn(rule: Chained | StepByStep, lengths: tuple[int, ...], step: int) -> list[str]:
    """One line a query of *step*; the keys of steps 0 … step, one group each."""
    rows = document_slots(lengths)
    keys = concatenate_slots([step_slots(rows, each) for each in range(step + 1)])
    lines = []
    for line in dense_mask(rule, step_slots(rows, step), keys).tolist():
        total = sum(lengths)
        groups = [line[begin : begin + total] for begin in range(0, len(line), total)]
        lines.append(" ".join("".join("#" if each else "." for each in group) for group in groups))
    return lines


def test_who_sees_whom() -> None:
    assert drawn(Chained(), (3, 2), 1) == [
        "#.... #....",
        "##... .#...",
        "###.. ..#..",
        "...#. ...#.",
        "...## ....#",
    ]
    assert drawn(StepByStep(), (3, 2), 1) == [
        "..... #....",
        "..... ##...",
        "..... ###..",
        "..... ...#.",
        "..... ...##",
    ]
    assert drawn(StepByStep(window=2), (4,), 1)[3] == ".... ..##"


def test_only_rules_that_show_others_steps_need_all_rows() -> None:
    assert not continues_all(Chained())
    assert continues_all(StepByStep())
    assert continues_all(Causal())


def test_a_form_that_a_rule_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear form"):
        chain_attention(Causal(), "linear")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("mimo"), "llama", finish=add_head)


def with_mask(case: AlgorithmCase, rule: Chained | StepByStep | Causal, attention: str = "auto") -> AlgorithmCase:
    setup = attrs.evolve(case.algorithm.setup, mask=rule, attention=attention)
    return attrs.evolve(case, algorithm=type(case.algorithm)(setup))


def by_the_paper(model: MtpDraft, tokens: Tensor, hidden: Tensor, num_steps: int) -> list[Tensor]:
    """Logits [T - K - 1, V] of each step on one document, from torch's own attention: every step is a causal pass of
    its own over the same rows, whose positions do not advance."""
    head, width = model.head, hidden.shape[1]
    layer = head.layer
    length = len(tokens) - num_steps
    hidden = hidden[:length]
    results = []
    for step in range(num_steps):
        embedded = model.embed_tokens.weight[tokens[step + 1 : step + 1 + length]].float()
        if step == 0:  # what vLLM zeroes there
            embedded = torch.cat((torch.zeros(1, width), embedded[1:]))
        u = head.input_proj(torch.cat((head.hidden_layernorm(hidden), head.token_layernorm(embedded)), dim=-1))
        normed, config = layer.input_layernorm(u), layer.config
        table = layer.rotary(torch.arange(length))
        attention = layer.self_attn
        heads = []
        for projection, count in ((attention.q_proj, 2), (attention.k_proj, 1), (attention.v_proj, 1)):
            heads.append(projection(normed).view(length, count, config.head_dim))
        half = config.head_dim // 2
        for place in (0, 1):
            x = heads[place]
            turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
            heads[place] = x * table.cos[:, None] + turned * table.sin[:, None]
        q, k, v = (each.transpose(0, 1) for each in heads)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        u = u + attention.o_proj(attended.transpose(0, 1).flatten(1))
        u = u + layer.mlp(layer.post_attention_layernorm(u))
        hidden = head.final_layernorm(u)
        results.append(hidden @ model.lm_head.weight.float().T)
    return results


@pytest.mark.parametrize("attention", ["auto", "dense"])
def test_step_by_step_is_the_papers_scheme(material: Material, attention: str) -> None:
    """Also where documents are packed: each as it is alone."""
    case = with_mask(tiny_case(material, "mtp"), StepByStep(), attention)
    model = case.algorithm.build_model().eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    slots = case.algorithm.forward(model, case.algorithm.make_batch(case.row, torch.Generator()))
    logits = slot_logits(slots).detach()
    compared = 0
    for number, document in enumerate(case.documents):
        tokens, begin = document.input_ids, case.row.document_ids.tolist().index(number)
        if len(tokens) < case.num_steps + 2:
            continue
        with torch.no_grad():
            wanted = by_the_paper(model, tokens, document.last_hidden, case.num_steps)
        for slot, (teacher, step) in enumerate(zip(slots.teacher_row.tolist(), slots.step.tolist(), strict=True)):
            row = teacher - step - 1 - begin
            if case.row.document_ids[teacher] == number and row < len(wanted[step]):
                torch.testing.assert_close(logits[slot], wanted[step][row], rtol=0, atol=1e-4)
                compared += 1
    assert compared > 15
    assert set(slots.step.tolist()) == {0, 1, 2}


def test_the_masks_differ_from_the_second_step_on(material: Material) -> None:
    """At step 0 both see the rows before; later, only `chained` sees what vLLM's cache holds."""
    case = tiny_case(material, "mtp")
    model = case.algorithm.build_model().eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    found = []
    for each in (case, with_mask(case, StepByStep())):
        slots = each.algorithm.forward(model, each.algorithm.make_batch(each.row, torch.Generator()))
        found.append((slots, slot_logits(slots).detach()))
    (slots, served), (_, paper) = found
    first = slots.step == 0
    torch.testing.assert_close(served[first], paper[first], rtol=0, atol=1e-5)
    assert bool(((served - paper).abs().amax(-1) > 1e-3)[~first].any())


def test_chosen_by_name_in_a_recipe(tmp_path: Path) -> None:
    from draftsmith.plugins import load_plugins, load_reference

    item = load_plugins().masks.get("step_by_step")
    assert load_reference(item.implementation) is StepByStep
