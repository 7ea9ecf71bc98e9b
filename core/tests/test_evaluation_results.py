"""What an evaluation writes, and reads again; what is demanded of it."""

from __future__ import annotations

import csv
import io
import json

import attrs
import cattrs
import pytest
from evaluations import request, sample_evaluation
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import DataError, UserError
from draftsmith.evaluation.metrics import Spread
from draftsmith.evaluation.require import FIGURES, failures, parse_requirement
from draftsmith.evaluation.results import (
    CSV_COLUMNS,
    FILE,
    VERSION,
    Evaluation,
    Method,
    PromptRecord,
    Repetition,
    as_csv,
    as_json,
    counters_of,
    figures,
    read_evaluation,
    write_evaluation,
)
from draftsmith.serving.vllm_process import DraftCounters


@pytest.fixture
def evaluation() -> Evaluation:
    return sample_evaluation()


def test_figures_come_from_counts_and_times(evaluation):
    none, draft, _ = evaluation.methods
    found = figures(draft, none)
    assert found["rounds"] == 8
    assert found["acceptance_length"] == 1 + 10 / 8
    assert found["acceptance_per_position"] == [0.75, 0.5]
    # 11 tokens of both answers in 2 and in 4 seconds; without a draft 2 tokens in 1 and in 2.
    assert found["tokens_per_second"] == Spread(median=4.125, low=2.75, high=5.5, count=2)
    assert found["speed_up"] == Spread(median=2.75, low=2.75, high=2.75, count=2)
    assert found["time_to_first_token"] == Spread(median=pytest.approx(0.3), low=0.2, high=0.4, count=2)
    assert (found["identical"], found["lossless"]) == (1, True)
    assert figures(none, none)["speed_up"].median == 1.0
    assert figures(none, none)["acceptance_length"] is None
    assert figures(draft, None)["speed_up"] is None


def test_figures_of_a_category_are_of_its_prompts_alone(evaluation):
    none, draft, _ = evaluation.methods
    coding = figures(draft, none, evaluation.of_category("coding"))
    assert coding["acceptance_length"] == 1 + 3 / 2
    assert "tokens_per_second" not in coding
    assert evaluation.categories == ("coding", "chat, “quoted”")


def test_rounds_and_counters_count_the_same(evaluation):
    draft = evaluation.methods[1]
    assert counters_of(draft) == counters_of(draft, evaluation.of_category(None))


def test_it_is_read_as_it_was_written(evaluation, tmp_path):
    write_evaluation(tmp_path, evaluation)
    assert read_evaluation(tmp_path) == evaluation
    assert read_evaluation(tmp_path / FILE) == evaluation


COUNTS = st.lists(st.integers(0, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=6)


@given(st.lists(COUNTS, min_size=1, max_size=3), st.text(max_size=5), st.floats(0.01, 100))
def test_any_counts_survive_json(rounds, name, seconds):
    requests = tuple(request(index, each, seconds) for index, each in enumerate(rounds))
    counters = DraftCounters.of_rounds([each for some in rounds for each in some], 3)
    method = Method(
        name=name,
        status="measured",
        num_speculative_tokens=3,
        repetitions=(Repetition(counters=counters, requests=requests, seconds=seconds),),
    )
    prompts = tuple(PromptRecord(set="s", category=name, tokens=1) for _ in rounds)
    whole = Evaluation(complete=False, settings={}, provenance={}, prompts=prompts, methods=(method,))
    text = json.dumps(as_json(whole))
    assert cattrs.structure(json.loads(text), Evaluation) == whole
    assert len(list(csv.DictReader(io.StringIO(as_csv(whole))))) == 1


def test_the_csv_has_a_line_for_each_method_and_category(evaluation):
    rows = list(csv.DictReader(io.StringIO(as_csv(evaluation))))
    assert list(rows[0]) == list(CSV_COLUMNS)
    assert [(row["method"], row["category"]) for row in rows] == [
        ("none", "all"),
        ("none", "coding"),
        ("none", "chat, “quoted”"),
        ("out/checkpoint", "all"),
        ("out/checkpoint", "coding"),
        ("out/checkpoint", "chat, “quoted”"),
        ("suffix", "all"),
    ]
    draft = rows[3]
    assert float(draft["speed_up"]) == 2.75
    assert float(draft["round_cost"]) == pytest.approx(2.25 / 2.75)
    assert (float(draft["drafting_share"]), float(draft["verifying_share_high"])) == (0.25, 0.5)
    assert rows[0]["drafting_share"] == ""
    assert [float(share) for share in draft["acceptance_per_position"].split()] == [0.75, 0.5]
    assert rows[0]["acceptance_length"] == ""
    assert rows[6]["reason"] == "arctic-inference is not installed"


@pytest.mark.parametrize("begin", ["=1+1", "+1", "-1", "@sum(a)", "\tx", "\rx"])
def test_no_cell_of_text_is_a_formula(begin):
    evaluation = sample_evaluation(begin)
    methods = [attrs.evolve(each, name=f"{begin} {each.name}", reason=begin) for each in evaluation.methods]
    rows = list(csv.DictReader(io.StringIO(as_csv(attrs.evolve(evaluation, methods=tuple(methods))), newline="")))
    assert {row["method"] for row in rows} == {f"'{each.name}" for each in methods}
    assert {row["reason"] for row in rows} == {f"'{begin}"}
    assert {row["category"] for row in rows} == {"all", "coding", f"'{begin}"}
    plain = list(csv.DictReader(io.StringIO(as_csv(sample_evaluation()))))
    assert not any(cell.startswith("'") for row in plain for cell in row.values())


def test_a_file_that_is_no_evaluation_is_refused(evaluation, tmp_path):
    with pytest.raises(DataError, match="there is no evaluation"):
        read_evaluation(tmp_path)
    file = tmp_path / FILE
    file.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_evaluation(tmp_path)
    file.write_text('{"schema": "something"}')
    with pytest.raises(DataError, match="is not an evaluation"):
        read_evaluation(tmp_path)
    value = as_json(evaluation)
    file.write_text(json.dumps({**value, "version": VERSION + 1}))
    with pytest.raises(DataError, match=f"version {VERSION + 1}"):
        read_evaluation(tmp_path)
    del value["prompts"]
    file.write_text(json.dumps(value))
    with pytest.raises(DataError, match="is not complete"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("prompt", 2, "answers prompt 2, and there are 2"),
        ("prompt", -1, "answers prompt -1"),
        ("rounds", [{"drafted": 2, "accepted": 3, "draft": []}], "accepts more than its 2 tokens"),
    ],
)
def test_a_damaged_evaluation_that_contradicts_itself_is_refused(evaluation, tmp_path, key, wrong, message):
    value = as_json(evaluation)
    value["methods"][1]["repetitions"][0]["requests"][0][key] = wrong
    (tmp_path / FILE).write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        read_evaluation(tmp_path)


def test_a_baseline_without_tokens_gives_no_ratio(evaluation):
    none, draft, _ = evaluation.methods
    idle = attrs.evolve(none, repetitions=tuple(attrs.evolve(each, requests=()) for each in none.repetitions))
    assert figures(draft, idle)["speed_up"] is None


# --- demands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("acceptance_length>=2.1", True),
        ("acceptance_length >= 2.25", True),
        ("acceptance_length>2.25", False),
        ("acceptance_per_position[2]>=0.6", False),
        ("acceptance_per_position[1]>=0.6", True),
        ("speed_up>=2.75", True),
        ("lossless==true", True),
        ("none:speed_up<=1", True),
        ("identical==2", False),
        ("acceptance_per_position[3]>0", False),
        ("suffix:acceptance_length>1", False),
        ("ngram:acceptance_length>1", False),
    ],
)
def test_demands(evaluation, text, met):
    found = failures([parse_requirement(text)], evaluation, "out/checkpoint")
    assert (not found) is met
    assert all(text.strip() in why for why in found)


def test_a_failed_demand_says_what_was_found(evaluation):
    demands = [parse_requirement(text) for text in ("acceptance_length>=3", "suffix:speed_up>1", "nobody:speed_up>1")]
    assert failures(demands, evaluation, "out/checkpoint") == [
        "acceptance_length>=3: it is 2.25",
        "suffix:speed_up>1: speed_up of suffix was not measured (arctic-inference is not installed)",
        "nobody:speed_up>1: no method 'nobody' was evaluated",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acceptance_length", "cannot be read"),
        ("acceptance_length=>2", "cannot be read"),
        ("acceptance_lenght>=2", "did you mean 'acceptance_length'"),
        ("acceptance_length>=two", "not a number"),
        ("acceptance_length>=nan", "not a number"),
        ("acceptance_per_position>=0.5", r"acceptance_per_position\[1\]"),
        ("acceptance_per_position[0]>=0.5", "count from 1"),
        ("speed_up[1]>=0.5", "write speed_up"),
    ],
)
def test_a_demand_that_cannot_be_read(text, message):
    with pytest.raises(UserError, match=message):
        parse_requirement(text)


@given(st.sampled_from(FIGURES), st.sampled_from([">=", "<=", "==", ">", "<"]), st.floats(allow_nan=False, width=32))
def test_every_figure_can_be_demanded(figure, operator, value):
    if value in (float("inf"), float("-inf")):
        return
    place = "[2]" if "position" in figure or "conditional" in figure else ""
    demand = parse_requirement(f"{figure}{place}{operator}{value!r}")
    assert (demand.figure, demand.operator, demand.value) == (figure, operator, value)


def test_every_demand_is_on_a_figure_that_there_is(evaluation):
    assert set(FIGURES) <= set(figures(evaluation.methods[1], evaluation.methods[0]))
    assert {each.name for each in attrs.fields(Evaluation)} < set(as_json(evaluation))
