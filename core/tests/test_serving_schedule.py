"""Schedules of tokens by batch size: what is refused, and that vLLM makes of the others what is meant."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import ConfigError, DataError
from draftsmith.serving.schedule import KEY, NO_END, Step, as_plan, check_schedule, disabled_above, read_plan


@pytest.fixture(scope="module")
def vllms() -> ModuleType:
    """vLLM's own reading of a schedule, without importing vLLM."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    path = Path(folder) / "v1" / "spec_decode" / "dynamic" / "utils.py"
    spec = importlib.util.spec_from_file_location("vllms_schedule", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STEPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(-1, 6)), max_size=4)


@given(value=STEPS)
@pytest.mark.vllm
def test_what_vllm_refuses_is_refused(vllms, value):
    try:
        ours = check_schedule([list(step) for step in value], 5, where="plan")
    except ConfigError:
        return
    theirs = vllms.validate_and_normalize_dynamic_sd_schedule([list(step) for step in value])
    assert [tuple(step) for step in ours] == theirs


@given(value=STEPS)
@pytest.mark.vllm
def test_what_is_refused_beyond_that_is_what_vllm_would_cut(vllms, value):
    plain = [list(step) for step in value]
    try:
        vllms.validate_and_normalize_dynamic_sd_schedule(plain)
    except ValueError:
        with pytest.raises(ConfigError):
            check_schedule(plain, 5, where="plan")
        return
    if max(tokens for *_, tokens in plain) > 5:
        with pytest.raises(ConfigError, match="without a word"):
            check_schedule(plain, 5, where="plan")


@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True), size=st.integers(1, 20))
@pytest.mark.vllm
def test_nothing_is_drafted_above_the_given_size(vllms, cuts, size):
    ends = sorted(cuts)
    steps = [
        Step(first + 1, last, 5 - place) for place, (first, last) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    before = vllms.build_dynamic_sd_schedule_lookup([list(step) for step in steps], 40, 5)
    limited = check_schedule([list(step) for step in disabled_above(steps, size)], 5, where="plan")
    after = vllms.build_dynamic_sd_schedule_lookup([list(step) for step in limited], 40, 5)
    assert after[1 : size + 1] == before[1 : size + 1]
    assert after[size + 1 :] == [0] * (40 - size)


def test_disabled_above_one_size():
    assert disabled_above([Step(1, 8, 5)], 8) == [Step(1, 8, 5), Step(9, NO_END, 0)]
    # Between the last step and the size the tokens before are kept, as vLLM keeps them.
    assert disabled_above([Step(1, 4, 5)], 8) == [Step(1, 4, 5), Step(9, NO_END, 0)]
    assert disabled_above([Step(1, 4, 5), Step(5, 16, 2), Step(17, 64, 1)], 8) == [
        Step(1, 4, 5), Step(5, 8, 2), Step(9, NO_END, 0),
    ]  # fmt: skip


def test_a_plan_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "plan.json"
    steps = [Step(1, 4, 5), Step(5, 16, 2), Step(17, 64, 0)]
    path.write_text(json.dumps(as_plan(steps)))
    assert read_plan(path, 5) == steps
    path.write_text(json.dumps([[5, 16, 2], [1, 4, 5]]))
    assert read_plan(path, 5) == steps[:2]
    path.write_text(json.dumps({KEY: [[1, 4, 5]]}))
    assert read_plan(path, 5) == steps[:1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds no steps"),
        ("{}", "holds no steps"),
        ('"text"', "holds no steps"),
        ("[[1, 4]]", "not a step of three whole numbers"),
        ('[[1, "4", 2]]', "not a step of three whole numbers"),
        ("[[1, true, 2]]", "not a step of three whole numbers"),
        ("[[1, 8, 5], [8, 16, 2]]", r"\[1, 8, 5\] and \[8, 16, 2\] overlap"),
        ("[[2, 8, 5]]", "begins at 2 requests"),
        ("[[0, 8, 5]]", "covers no batch size"),
        ("[[8, 1, 5]]", "covers no batch size"),
        ("[[1, 8, -1]]", "less than no token"),
        ("[[1, 8, 6]]", "asks for 6 tokens a round, the draft is served with 5"),
        ('{"schema": "draftsmith.plan", "version": 2}', "version 2"),
    ],
)
def test_a_plan_that_makes_no_sense(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises((DataError, ConfigError), match=message):
        read_plan(path, 5)


def test_all_problems_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        check_schedule([[2, 8, 9], [8, 3, -1]], 5, where="plan.json")
    assert len(error.value.problems) == 5
    assert all(each.where == "plan.json" for each in error.value.problems)
    with pytest.raises(DataError, match="no such plan"):
        read_plan(tmp_path / "gone.json", 5)
