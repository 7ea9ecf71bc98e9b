"""Watching servers: counters over HTTP, the window, alarms, and what the command prints."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator

import attrs
import pytest
from evaluations import sample_evaluation
from exposition import Exposition, K, served
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.cli import main
from draftsmith.cli.watch import _teller
from draftsmith.errors import DataError, ServingError, UserError
from draftsmith.evaluation.results import write_evaluation
from draftsmith.serving import counters as counters_module
from draftsmith.serving.counters import Reading, metrics_address, parse_metrics, read_metrics
from draftsmith.serving.vllm_process import DraftCounters
from draftsmith.serving.watch import ENOUGH, Expectation, Sample, Window, alarms, expectation, nearest


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve what a function returns, (status, text), on a port of this machine; gives the address."""
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(served(answer))


# --- counters ---------------------------------------------------------------------------------------------------


def test_counters_are_summed_over_engines(serve):
    exposition = Exposition(engines=2)
    exposition.count([3, 1, 0])
    exposition.metrics["first"].labels(**exposition.engines[0]).observe(0.5)
    found = read_metrics(serve(lambda: (200, exposition.text())))
    assert found.counters == DraftCounters(drafts=6, drafted=18, accepted=8, accepted_per_position=(4, 2, 2))
    assert (found.generated, found.running, found.waiting) == (14, 4, 2)
    assert (found.first_tokens, found.first_token_seconds) == (1, 0.5)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host:8000", "http://host:8000/metrics"),
        ("host:8000", "http://host:8000/metrics"),
        ("https://host/vllm/", "https://host/vllm/metrics"),
        ("http://host:8000/metrics", "http://host:8000/metrics"),
        ("http://host:8000/v1", "http://host:8000/metrics"),
    ],
)
def test_addresses(url, address):
    assert metrics_address(url) == address


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "file:///etc/passwd", "http://", "", "http://[::1", "http://host:port", "host:99999", "host/ü"],
)
def test_what_is_no_address(url):
    with pytest.raises(UserError, match="no address of a server"):
        metrics_address(url)


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (404, "", "answers 404 Not Found: this is no vLLM server"),
        (200, "<html><body>Hello</body></html>", "vLLM|does not answer with counters"),
        (200, "python_info 1.0\n", "has no counters of vLLM, only those of another program"),
        (200, "", "has no counters of vLLM"),
        (200, Exposition(drafts=False).text(), "drafts nothing"),
        (200, 'vllm:num_requests_running{engine="0"} 1.0\n', "drafts nothing"),
    ],
)
def test_servers_that_cannot_be_watched(serve, status, text, message):
    with pytest.raises(ServingError, match=message):
        read_metrics(serve(lambda: (status, text)))


def test_a_name_that_no_host_can_have():
    with pytest.raises(ServingError, match="cannot be reached"):
        read_metrics(f"http://{'a' * 64}:8000")


def test_a_server_that_is_not_there(serve, monkeypatch):
    monkeypatch.setattr(counters_module, "TIMEOUT", 2.0)
    with pytest.raises(ServingError, match="cannot be reached"):
        read_metrics("http://127.0.0.1:9")


# --- the window -------------------------------------------------------------------------------------------------


def reading(time: float, accepted: list[int], before: DraftCounters | None = None, running: int = 2) -> Reading:
    new = DraftCounters.of_rounds([(K, each) for each in accepted], K)
    total = new if before is None else before + new
    return Reading(time=time, counters=total, generated=float(total.drafts + total.accepted), running=running)


@given(st.lists(st.lists(st.integers(0, K), max_size=8), min_size=2, max_size=12), st.integers(1, 30))
def test_a_window_tells_what_happened_in_it(batches, seconds):
    window = Window(float(seconds))
    total = DraftCounters.none(K)
    for number, batch in enumerate(batches):
        total += DraftCounters.of_rounds([(K, each) for each in batch], K)
        assert window.add(Reading(time=float(number), counters=total))
    last = len(batches) - 1
    first = max(0, last - seconds)
    inside = list(itertools.chain(*batches[first + 1 :]))
    sample = window.sample()
    assert sample is not None
    assert (sample.seconds, sample.rounds) == (last - first, len(inside))
    if inside:
        assert sample.acceptance_length == pytest.approx(1 + sum(inside) / len(inside))
    else:
        assert sample.acceptance_length is None


def test_a_restart_empties_the_window():
    window = Window(60.0)
    window.add(reading(0.0, [3, 3, 3]))
    assert window.sample() is None
    assert not window.add(reading(1.0, [0]))
    assert window.sample() is None
    assert window.add(reading(2.0, [1, 1], reading(1.0, [0]).counters))
    sample = window.sample()
    assert sample is not None
    assert sample.acceptance_length == 2.0
    assert sample.tokens_per_second == 4.0


def test_a_restart_is_seen_where_nothing_was_drafted():
    window, idle = Window(60.0), DraftCounters.none(K)
    assert window.add(Reading(time=0.0, counters=idle, generated=900.0))
    assert not window.add(Reading(time=1.0, counters=idle, generated=5.0))
    assert window.sample() is None


# --- alarms -----------------------------------------------------------------------------------------------------


def sampled(length: float, *, running: int = 8, rounds: int = ENOUGH, shares=(0.6, 0.3, 0.05)) -> Sample:
    return Sample(
        seconds=60.0, rounds=rounds, acceptance_length=length, acceptance_per_position=shares,
        draft_acceptance_rate=0.3, drafted_per_second=1.0, accepted_per_second=1.0, tokens_per_second=1.0,
        time_to_first_token=None, inter_token_latency=None, running=running, waiting=0,
    )  # fmt: skip


EXPECTED = [Expectation(acceptance_length=2.5, break_even=1.4, concurrency=8)]


def kinds(sample: Sample, expectations=EXPECTED, below=0.1) -> list[str]:
    return [each.kind for each in alarms(sample, expectations, below)]


def test_acceptance_below_the_evaluations():
    assert kinds(sampled(2.25)) == []
    assert kinds(sampled(2.24)) == ["acceptance"]
    assert kinds(sampled(2.24), below=0.2) == []
    assert kinds(sampled(1.0), expectations=[]) == []
    assert kinds(sampled(1.0, rounds=ENOUGH - 1)) == []
    (alarm,) = alarms(sampled(2.0), EXPECTED, 0.1)
    assert "acceptance length 2.00, 2.50 when it was evaluated" in alarm.what
    assert alarm.hint.startswith("lower the tokens a round to 2 (--speculative-tokens 2)")
    (alarm,) = alarms(sampled(2.0, shares=(0.6, 0.3, 0.2)), EXPECTED, 0.1)
    assert alarm.hint.startswith("are these other prompts")


def test_speculation_that_costs_more_than_it_gains():
    assert kinds(sampled(1.3)) == ["acceptance", "load"]
    assert kinds(sampled(1.5)) == ["acceptance"]
    # A load far from that of the evaluation: nothing is known of what a round costs there.
    assert kinds(sampled(1.3, running=17)) == ["acceptance"]
    assert kinds(sampled(1.3), [Expectation(acceptance_length=1.3, break_even=None, concurrency=8)]) == []
    alarm = list(alarms(sampled(1.3), EXPECTED, 0.1))[1]
    assert "with 8 requests at once a round costs 1.40 steps" in alarm.what
    assert "--disable-by-batch-size 8" in alarm.hint


def test_the_evaluation_of_the_nearest_load_counts():
    several = [attrs.evolve(EXPECTED[0], concurrency=each, break_even=each / 4) for each in (1, 4, 16, 64)]
    for running, concurrency in ((0, 1), (1, 1), (3, 4), (7, 4), (9, 16), (200, 64)):
        found = nearest(several, running)
        assert found is not None
        assert found.concurrency == concurrency
    assert nearest([], 3) is None


def test_an_evaluation_without_a_limit_tells_what_is_accepted_and_no_cost():
    evaluation = attrs.evolve(sample_evaluation(), settings={"checkpoint": "out/checkpoint", "concurrency": None})
    found = expectation(evaluation)
    assert (found.concurrency, found.break_even) == (None, None)
    (alarm,) = alarms(sampled(found.acceptance_length / 2), [found], 0.1)
    assert alarm.kind == "acceptance"
    limited = attrs.evolve(found, concurrency=4)
    assert nearest([found, limited], 1000) is limited
    wrong = attrs.evolve(evaluation, settings={"checkpoint": "out/checkpoint", "concurrency": "many"})
    with pytest.raises(DataError, match="the concurrency 'many', which is no number"):
        expectation(wrong)


def test_the_command_says_what_is_held_against_an_evaluation_without_a_limit(serve, tmp_path, capsys):
    settings = {"checkpoint": "out/checkpoint", "concurrency": None}
    write_evaluation(tmp_path / "it", attrs.evolve(sample_evaluation(), settings=settings))
    exposition = Exposition()
    main(
        [
            "watch",
            serve(lambda: (200, exposition.text())),
            "--once",
            "--every",
            "0.1",
            "--evaluation",
            str(tmp_path / "it"),
        ]
    )
    assert "requests at once were not limited: what is accepted is held against it" in capsys.readouterr().err


def test_what_an_evaluation_leads_to_expect():
    evaluation = sample_evaluation()
    settings = {**evaluation.settings, "checkpoint": "out/checkpoint", "concurrency": 4}
    found = expectation(attrs.evolve(evaluation, settings=settings))
    # 2.25 tokens a round, and 2.75 times the speed: a round is cheaper than a step without a draft here.
    assert found == Expectation(acceptance_length=2.25, break_even=2.25 / 2.75, concurrency=4)
    assert expectation(attrs.evolve(evaluation, settings={"checkpoint": "suffix"})) is None
    assert expectation(attrs.evolve(evaluation, settings={"checkpoint": "nobody"})) is None


# --- the command ------------------------------------------------------------------------------------------------


def growing(accepted: list[int]) -> Callable[[], tuple[int, str]]:
    """A server that counts these rounds anew before each reading."""
    exposition = Exposition()

    def answer() -> tuple[int, str]:
        exposition.count(accepted)
        return 200, exposition.text()

    return answer


@pytest.fixture
def evaluated(tmp_path):
    evaluation = sample_evaluation()
    settings = {**evaluation.settings, "checkpoint": "out/checkpoint", "concurrency": 2}
    write_evaluation(tmp_path / "evaluated", attrs.evolve(evaluation, settings=settings))
    return tmp_path / "evaluated"


def test_once_tells_and_alarms(serve, evaluated, capsys):
    well, badly = serve(growing([3, 2] * ENOUGH)), serve(growing([1, 0, 0] * ENOUGH))
    command = ["watch", "--once", "--every", "0.1"]
    assert main([*command, well, "--evaluation", str(evaluated)]) == 0
    shown = capsys.readouterr().out
    assert f"{well}: acceptance length 3.50 (100 100 50 % by position)" in shown
    assert "2 running, 1 waiting; 200 rounds" in shown
    assert main([*command, well, badly, "--evaluation", str(evaluated)]) == 1
    shown = capsys.readouterr().out
    assert "alarm: acceptance length 1.33, 2.25 when it was evaluated" in shown
    assert "lower the tokens a round to 1" in shown
    assert main([*command, badly]) == 0  # held against nothing


def test_json_is_one_object_a_line(serve, evaluated, capsys):
    badly = serve(growing([1, 0, 0] * ENOUGH))
    assert main(["watch", "--once", "--every", "0.1", "--json", badly, "--evaluation", str(evaluated)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    value = json.loads(line)
    assert value["server"] == badly
    assert value["sample"]["rounds"] == 300
    assert [each["kind"] for each in value["alarms"]] == ["acceptance"]


def test_a_terminal_shows_a_table_that_is_drawn_anew(serve, evaluated, monkeypatch, capsys):
    well, badly = serve(growing([3, 2] * ENOUGH)), serve(growing([1, 0, 0] * ENOUGH))
    answers, answer = itertools.count(), growing([1])
    going = serve(lambda: answer() if next(answers) < 2 else (503, ""))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    pauses = iter([None, None])

    def pause(seconds):
        if next(pauses, "last") == "last":
            raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.cli.watch.time.sleep", pause)
    main(["watch", well, badly, going, "--evaluation", str(evaluated)])
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "acceptance length" in shown
    assert re.search(rf"{well} +3\.50 +100 100 50", shown)
    assert shown.count(f"{well} ") >= 2
    assert f"{badly}: alarm: acceptance length 1.33, 2.25 when it was evaluated" in shown
    assert "lower the tokens a round to 1" in shown
    assert f"{going}: answers 503" in shown


def test_brackets_of_an_address_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    state = {"server": "http://[fe80::1]:8000", "trouble": None, "restarted": False, "alarms": []}
    with _teller(as_json=False, once=False) as tell:
        tell([{**state, "sample": sampled(2.0)}])
    assert "http://[fe80::1]:8000" in capsys.readouterr().out


def test_a_server_that_goes_away_is_told_and_the_others_go_on(serve, capsys):
    well, gone = serve(growing([1])), serve(lambda: (503, ""))
    assert main(["watch", "--once", "--every", "0.1", well, gone]) == 1
    shown = capsys.readouterr().out
    assert f"{gone}: answers 503" in shown
    assert f"{well}: acceptance length 2.00" in shown


def test_without_once_a_wrong_server_is_an_error_at_once(serve, capsys):
    assert main(["watch", serve(lambda: (200, Exposition(drafts=False).text()))]) == 1
    assert "drafts nothing" in capsys.readouterr().err
    assert main(["watch", "ftp://host", "--once"]) == 2
    assert main(["watch", "host", "--once", "--every", "inf"]) == 2


def test_it_is_held_against_one_evaluation_a_concurrency(serve, evaluated, tmp_path, capsys):
    assert main(["watch", "host", "--evaluation", str(evaluated), "--evaluation", str(evaluated)]) == 2
    assert "two evaluations of one concurrency" in capsys.readouterr().err
    whole = sample_evaluation()
    write_evaluation(tmp_path / "bare", attrs.evolve(whole, methods=whole.methods[2:]))
    assert main(["watch", "host", "--evaluation", str(tmp_path / "bare")]) == 2
    assert "was not measured" in capsys.readouterr().err


def test_the_text_alone_is_enough():
    exposition = Exposition()
    exposition.count([2])
    assert parse_metrics(exposition.text(), "here", 5.0).time == 5.0
