"""An evaluation by hand: few enough counts and times to work its figures out on paper."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.evaluation.metrics import Losslessness, RequestTimes
from draftsmith.evaluation.results import Evaluation, Method, PromptRecord, Repetition, RequestRecord, RoundRecord
from draftsmith.serving.vllm_process import DraftCounters


def request(prompt: int, rounds: Sequence[tuple[int, int]], seconds: float) -> RequestRecord:
    """An answer whose rounds are (drafted, accepted), and whose tokens are 0, 1, 2, …; a rejected token is 99."""
    tokens = 1 + sum(accepted + 1 for _, accepted in rounds)
    return RequestRecord(
        prompt=prompt,
        times=RequestTimes(tokens=tokens, first_token=seconds / 10, last_token=seconds),
        output=tuple(range(tokens)),
        rounds=tuple(
            RoundRecord(drafted=drafted, accepted=accepted, draft=(*range(accepted), *[99] * (drafted - accepted)))
            for drafted, accepted in rounds
        ),
    )


def repetition(seconds: float, *, drafts: bool) -> Repetition:
    """Two answers: six and five tokens with a draft of two, one token each without."""
    rounds: Sequence[Sequence[tuple[int, int]]] = ([(2, 2), (2, 1)], [(2, 0), (2, 2)]) if drafts else ([], [])
    return Repetition(
        counters=DraftCounters.of_rounds([*rounds[0], *rounds[1]], 2) if drafts else None,
        requests=tuple(request(prompt, each, seconds) for prompt, each in enumerate(rounds)),
        seconds=seconds,
        load_seconds=3.0,
        draft_seconds=seconds / 4 if drafts else None,
        verify_seconds=seconds / 2,
    )


def sample_evaluation(category: str = "chat, “quoted”") -> Evaluation:
    """Two prompts, two repetitions; no speculation, a draft, and a method that cannot be measured."""
    none = Method(
        name="none", status="measured", repetitions=(repetition(1.0, drafts=False), repetition(2.0, drafts=False))
    )
    draft = Method(
        name="out/checkpoint",
        status="measured",
        num_speculative_tokens=2,
        speculative_config={"method": "tinker", "num_speculative_tokens": 2},
        repetitions=(repetition(2.0, drafts=True), repetition(4.0, drafts=True)),
        losslessness=Losslessness(prompts=2, identical=1, ties=1, largest_gap=1e-5),
    )
    missing = Method(name="suffix", status="unavailable", reason="arctic-inference is not installed")
    return Evaluation(
        complete=True,
        settings={"temperature": 0.0, "repetitions": 2, "max_tokens": 6},
        provenance={"command": ["draftsmith", "evaluate"]},
        prompts=(
            PromptRecord(set="a", category="coding", tokens=7),
            PromptRecord(set="a", category=category, tokens=3),
        ),
        methods=(none, draft, missing),
        texts={0: "Hello", 1: " wörld", 2: "\n", 3: " <b>bold</b>", 4: " &amp;", 5: ".", 99: " wrong"},
    )
