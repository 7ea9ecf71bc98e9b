"""The table of an evaluation, its remarks, and the picture of an answer's tokens."""

from __future__ import annotations

import io

import attrs
from evaluations import repetition, request, sample_evaluation
from rich.console import Console

from draftsmith.evaluation.metrics import Losslessness
from draftsmith.evaluation.picture import Piece, covered, pictured, pieces, request_length, worst_requests
from draftsmith.evaluation.results import Method, RequestRecord
from draftsmith.evaluation.table import COLUMNS, method_cells, print_evaluation, print_worst, remarks
from draftsmith.serving.vllm_process import DraftCounters


def printed(show, *arguments, width: int = 200, **terminal: object) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, **terminal), *arguments)
    return out.getvalue()


def test_a_row_has_a_cell_for_each_column():
    none, draft, missing = sample_evaluation().methods
    cells = dict(zip(COLUMNS, method_cells(draft, none), strict=True))
    assert cells == {
        "method": "out/checkpoint",
        "K": "2",
        "acceptance length": "2.250",
        "accepted by position, %": "75 50",
        "of drafted, %": "62.5",
        "tokens/s": "4.1 (2.8–5.5)",
        "× none": "2.75",
        "first token, ms": "300 (200–400)",
        "per token, ms": "607.5 (405.0–810.0)",
        "identical": "1/2",
        "drafting, % of time": "25.0",
        "verifying, % of time": "50.0",
        "round costs steps": "0.82",
    }
    assert method_cells(none, none)[10:] == ["", "50.0", ""]
    assert method_cells(none, none)[2:5] == ["", "", ""]
    assert method_cells(missing, none)[:3] == ["suffix", "", "not measured"]
    assert len(method_cells(missing, none)) == len(COLUMNS)


def test_everything_is_printed_that_was_found():
    shown = printed(print_evaluation, sample_evaluation())
    for text in ("out/checkpoint", "2.250", "75 50", "Acceptance length by category", "chat, “quoted”"):
        assert text in shown
    assert "suffix: not measured: arctic-inference is not installed" in shown
    assert "1 answers part where two logits tie" in shown
    assert "incomplete" not in shown


def test_brackets_in_a_name_are_no_markup():
    evaluation = sample_evaluation(category="[/b] of [bold]")
    draft = attrs.evolve(evaluation.methods[1], name="out/[red]draft[/x]")
    shown = printed(print_evaluation, attrs.evolve(evaluation, methods=(evaluation.methods[0], draft)))
    assert "[/b] of [bold]" in shown
    assert shown.count("out/[red]draft[/x]") == 5  # four tables, and the remark


def test_no_figure_is_broken_on_a_narrow_terminal():
    shown = printed(print_evaluation, sample_evaluation(), width=60)
    for text in ("4.1 (2.8–5.5)", "300 (200–400)", "607.5 (405.0–810.0)", "not measured",
                 "identical"):  # fmt: skip
        assert text in shown
    # Nothing was timed: no table of times.
    whole = sample_evaluation()
    assert "Speed" not in printed(print_evaluation, attrs.evolve(whole, methods=whole.methods[2:]))


def test_remarks_warn():
    evaluation = sample_evaluation()
    draft = evaluation.methods[1]
    wrong = attrs.evolve(draft, losslessness=Losslessness(prompts=2, identical=1, ties=0))
    simulated = Method(
        name="out/checkpoint (simulated)",
        status="simulated",
        num_speculative_tokens=2,
        repetitions=(
            attrs.evolve(repetition(1.0, drafts=True), counters=DraftCounters.of_rounds([(2, 1), (2, 2)], 2)),
        ),
    )
    changed = attrs.evolve(
        evaluation,
        complete=False,
        settings={**evaluation.settings, "checkpoint": "out/checkpoint"},
        methods=(evaluation.methods[0], wrong, simulated),
    )
    found = list(remarks(changed))
    assert "warning: out/checkpoint: 1 answers differ from the verifier's, and not by a tie" in found
    # Position 1: all of two rounds, and three of four; position 2: half of both.
    assert "warning: the simulator and vLLM differ by 25.0 % at most, relatively, at a position" in found
    assert found[-1].startswith("incomplete")


def test_the_pieces_of_an_answer():
    first, second = sample_evaluation().methods[1].repetitions[0].requests
    assert list(pieces(first)) == [
        Piece("bonus", 0), Piece("accepted", 1), Piece("accepted", 2), Piece("bonus", 3),
        Piece("accepted", 4), Piece("rejected", 99), Piece("bonus", 5),
    ]  # fmt: skip
    assert [each.kind for each in pieces(second)] == ["bonus", "rejected", "bonus", "accepted", "accepted", "bonus"]
    cut = attrs.evolve(first, output=first.output[:3])  # the round accepted beyond the answer's end
    assert [each.kind for each in pieces(cut)] == ["bonus", "accepted", "accepted"]
    plain = attrs.evolve(first, rounds=())
    assert [each.kind for each in pieces(plain)] == ["bonus"] * 6
    assert not list(pieces(attrs.evolve(first, output=(), rounds=())))


def test_the_worst_come_first():
    requests = (request(0, [(2, 2)], 1.0), request(1, [(2, 0)], 1.0), request(2, [(2, 1)], 1.0), request(3, [], 1.0))
    method = Method(
        name="m", status="measured", repetitions=(attrs.evolve(repetition(1, drafts=True), requests=requests),)
    )
    assert [each.prompt for each in worst_requests(method, 2)] == [1, 2]
    assert [request_length(each) for each in worst_requests(method, 9)] == [1.0, 2.0, 3.0]
    assert request_length(requests[3]) is None
    assert worst_requests(attrs.evolve(method, repetitions=()), 2) == []


def test_the_picture_is_of_the_method_whose_drafts_are_known():
    evaluation = sample_evaluation()
    known = evaluation.methods[1]

    def forget(each: RequestRecord) -> RequestRecord:
        return attrs.evolve(each, rounds=tuple(attrs.evolve(one, draft=()) for one in each.rounds))

    once = known.repetitions[0]
    unknown = attrs.evolve(
        known, name="first", repetitions=(attrs.evolve(once, requests=tuple(map(forget, once.requests))),)
    )
    assert pictured(attrs.evolve(evaluation, methods=(unknown, known))) == known
    assert pictured(attrs.evolve(evaluation, methods=(unknown,))) == unknown
    assert pictured(attrs.evolve(evaluation, methods=evaluation.methods[:1])) is None


def test_answers_with_steps_that_drafted_nothing_are_not_pictured():
    first = sample_evaluation().methods[1].repetitions[0].requests[0]
    gaps = attrs.evolve(first, rounds=first.rounds[:1])  # the second step drafted nothing, so it was no round
    assert covered(first)
    assert not covered(gaps)
    method = sample_evaluation().methods[1]
    only = attrs.evolve(method, repetitions=(attrs.evolve(method.repetitions[0], requests=(gaps,)),))
    assert worst_requests(only, 3) == []
    assert pictured(attrs.evolve(sample_evaluation(), methods=(only,))) is None


def test_the_terminal_shows_tokens():
    shown = printed(print_worst, sample_evaluation(), 1)
    assert "prompt 1 (chat, “quoted”), acceptance length 2.00" in shown
    assert "[accepted] ~rejected~ bonus" in shown
    assert "Hello~ wrong~ wörld" in shown
    second = tuple(attrs.evolve(each, turn=2) for each in sample_evaluation().prompts)
    later = printed(print_worst, attrs.evolve(sample_evaluation(), prompts=second), 1)
    assert "prompt 1 (chat, “quoted”, turn 2), acceptance length 2.00" in later
    coloured = printed(print_worst, sample_evaluation(), 1, force_terminal=True, color_system="standard")
    assert "Hello\x1b[0m\x1b[9;31m wrong\x1b[0m\x1b[1;34m wörld" in coloured
    assert "~" not in coloured
    assert "no answer's rounds are known" in printed(
        print_worst, attrs.evolve(sample_evaluation(), methods=sample_evaluation().methods[:1]), 1
    )
