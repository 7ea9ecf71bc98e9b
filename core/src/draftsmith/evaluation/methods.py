"""The methods of an evaluation, from what ``--against`` names to what an engine is given.

    none                    the verifier alone, the baseline
    CHECKPOINT              a draft's folder that an installed plugin reads
    METHOD                  a method of the installed vLLM that needs no further model, or the verifier's own head
    METHOD:MODEL            a method of the installed vLLM, with the folder (or hub name) of its model
    METHOD[:MODEL]:KEY=VALUE    the same with options of its own, as many as wanted (``ngram:prompt_lookup_max=4``)

What this vLLM or this machine cannot serve keeps its place in the tables, with the reason.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from draftsmith.api import ServingPlan
from draftsmith.checkpoint.card import speculative_config
from draftsmith.checkpoint.exported import (
    CONFIG,
    open_format,
    read_config,
    schema_for,
    template_arguments_of,
    verifier_of,
)
from draftsmith.errors import UserError, did_you_mean
from draftsmith.evaluation.results import BASELINE
from draftsmith.evaluation.server import check_server
from draftsmith.serving.vllm_models import WRITTEN_FOR, speculative_keys, unknown_keys, unknown_method
from draftsmith.serving.vllm_process import missing_v2_runner, required_environment, vllm_version
from draftsmith.speculators import trained_tokens

if TYPE_CHECKING:
    from draftsmith.plugins import PluginRegistry

__all__ = [
    "Checkpoint",
    "MethodPlan",
    "check_tokens",
    "plan_methods",
    "plan_servers",
    "read_checkpoint",
    "split_names",
    "swept_name",
    "why_not_served",
]

#: Methods of vLLM that need a package of their own: method → (module, a folder in it, requirement). vLLM asks for the
#: module alone; early versions, which pip takes where there is no compiler, lack the folder.
_PACKAGES = {"suffix": ("arctic_inference", "suffix_decoding", "arctic-inference==0.1.1")}
#: An option of a method, at the end of its name.
_OPTION = re.compile(r"(?P<key>[a-z][a-z_]*)=(?P<value>[^/]+)")
#: Methods of vLLM that never start without a model of their own.
_NEEDS_MODEL = ("draft_model",)


@frozen(kw_only=True)
class Checkpoint:
    """A draft's folder, as its schema reads it.

    Attributes:
        trained: number of tokens that were trained; None where the config does not say.
        template_arguments: of the chat template, by which the data were rendered that it was trained on.
    """

    folder: Path
    plan: ServingPlan
    verifier: str
    trained: int | None
    template_arguments: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class MethodPlan:
    """One method, ready to be measured or known to be impossible here.

    Attributes:
        name: as it was asked for.
        speculative_config: None for the baseline.
        engine: further engine arguments.
        required: environment variables without which vLLM does not serve it so.
        reason: why it cannot be measured here; None: it can be tried.
        checkpoint: where it is a draft's folder.
        own: it is the checkpoint that is evaluated.
        server: address of a running server that serves it so; None: an engine of this machine does.
    """

    name: str
    num_speculative_tokens: int = 0
    speculative_config: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(factory=dict)
    required: Mapping[str, str] = field(factory=dict)
    reason: str | None = None
    checkpoint: Checkpoint | None = None
    own: bool = False
    server: str | None = None


def split_names(values: Iterable[str]) -> list[str]:
    """Names from options that may be repeated and may hold several, separated by commas; each once."""
    names = [name.strip() for value in values for name in value.split(",")]
    return list(dict.fromkeys(name for name in names if name))


def read_checkpoint(folder: Path, registry: PluginRegistry) -> Checkpoint:
    """What a draft's folder says of itself. Torch-free.

    Raises:
        CheckpointError: it cannot be read. UnknownNameError: no installed plugin reads its format.
    """
    config = read_config(folder)
    where = str(folder / CONFIG)
    plan = open_format(schema_for(config, registry, where)).serving(config)
    return Checkpoint(
        folder=folder,
        plan=plan,
        verifier=verifier_of(config, where),
        trained=trained_tokens(config),
        template_arguments=template_arguments_of(config),
    )


def plan_methods(
    checkpoint: str,
    against: Sequence[str],
    registry: PluginRegistry,
    *,
    num_speculative_tokens: int | None = None,
    draft_sample_method: str | None = None,
    token_counts: Sequence[int] = (),
) -> list[MethodPlan]:
    """The baseline first, where it is asked for, then the checkpoint, then the others.

    Args:
        checkpoint: the draft's folder.
        against: names as this module's docstring lists them.
        num_speculative_tokens: K of all methods; None: as the checkpoint says.
        draft_sample_method: how drafts sample their tokens; None: vLLM's default.
        token_counts: several K of the checkpoint, each a method of its own; empty: the one.

    Raises:
        CheckpointError, UnknownNameError: the checkpoint, or one of the others, cannot be read.
        UserError: a name means nothing, or K is more than was trained.
    """
    own = read_checkpoint(Path(checkpoint), registry)
    tokens = num_speculative_tokens or own.plan.num_speculative_tokens
    sampling = {} if draft_sample_method is None else {"draft_sample_method": draft_sample_method}
    ours: dict[str, int | None] = {swept_name(checkpoint, count): count for count in token_counts}
    ours = ours or {checkpoint: num_speculative_tokens}
    found = {
        name: evolve(_of_checkpoint(checkpoint, own, count, sampling), name=name, own=True)
        for name, count in ours.items()
    }
    for name in against:
        if name in found or name == checkpoint:
            continue
        if name == BASELINE:
            found = {BASELINE: MethodPlan(name=BASELINE), **found}
        elif _is_checkpoint(Path(name).expanduser()):
            other = read_checkpoint(Path(name).expanduser(), registry)
            found[name] = _of_checkpoint(name, other, num_speculative_tokens, sampling)
        else:
            found[name] = _of_vllm(name, tokens, sampling)
    return list(found.values())


def swept_name(checkpoint: str, tokens: int) -> str:
    """Name of the method that is a checkpoint with so many tokens a round, where several numbers are tried."""
    return f"{checkpoint} K={tokens}"


def plan_servers(checkpoint: str, servers: Mapping[str, str], registry: PluginRegistry) -> list[MethodPlan]:
    """Methods that running servers serve, the baseline first, where there is one.

    Args:
        servers: name of the method → address.

    Raises:
        ServingError, UserError: a server is not what its name says.
    """
    own = read_checkpoint(Path(checkpoint), registry)
    plans = [
        MethodPlan(
            name=name,
            num_speculative_tokens=check_server(address, drafts=name != BASELINE),
            checkpoint=own if name == checkpoint else None,
            own=name == checkpoint,
            server=address,
        )
        for name, address in servers.items()
    ]
    return sorted(plans, key=lambda each: each.name != BASELINE)


def _is_checkpoint(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and "speculators_model_type" in read_config(folder)


def _of_checkpoint(
    name: str, checkpoint: Checkpoint, num_speculative_tokens: int | None, sampling: Mapping[str, Any]
) -> MethodPlan:
    plan, tokens = checkpoint.plan, check_tokens(name, checkpoint, num_speculative_tokens)
    config = speculative_config(plan, str(checkpoint.folder.absolute()))
    return MethodPlan(
        name=name,
        num_speculative_tokens=tokens,
        speculative_config={**config, **sampling, "num_speculative_tokens": tokens},
        engine=plan.engine,
        required=required_environment(plan),
        reason=why_not_served(plan) or unknown_keys(sampling),
        checkpoint=checkpoint,
    )


def check_tokens(name: str, checkpoint: Checkpoint, num_speculative_tokens: int | None) -> int:
    """The number of tokens a round: what is asked for, or what the checkpoint says.

    Raises:
        UserError: that is more than was trained.
    """
    tokens = num_speculative_tokens or checkpoint.plan.num_speculative_tokens
    if checkpoint.trained is not None and tokens > checkpoint.trained:
        raise UserError(
            f"{tokens} tokens a round are asked for, {checkpoint.trained} were trained: the later ones extrapolate, "
            "and are mostly rejected",
            where=f"--speculative-tokens {tokens} ({name})" if num_speculative_tokens else str(checkpoint.folder),
            hint=f"ask for at most {checkpoint.trained}, or train more",
        )
    return tokens


def why_not_served(plan: ServingPlan) -> str | None:
    """Why the installed vLLM cannot serve a draft on this machine; None: it can be tried."""
    if plan.unservable is not None:
        return plan.unservable
    missing = missing_v2_runner() if plan.needs_v2_runner else None
    if missing is not None:
        return f"it needs vLLM's model runner V2, which cannot run here: {missing}"
    return unknown_method(plan.method, plan.since) or unknown_keys(plan.extra, plan.since or WRITTEN_FOR)


def _of_vllm(name: str, tokens: int, sampling: Mapping[str, Any]) -> MethodPlan:
    bare, options = _options(name)
    method, _, model = bare.partition(":")
    if "/" in method or Path(name).expanduser().exists():
        raise UserError(
            f"{name!r} is no draft's folder",
            where="--against",
            hint=f"a smaller model of the same vocabulary drafts as draft_model:{name}; "
            "other formats are named as METHOD:FOLDER",
        )
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens, **options}
    if model:
        local = Path(model).expanduser()
        if not local.exists() and model.startswith((".", "/", "~")):
            raise UserError("there is no such model", where=f"--against {name}", hint="name its folder")
        config = {**config, "model": str(local.absolute()) if local.exists() else model, **sampling}
    reason = unknown_method(method) or unknown_keys(sampling if model else ())
    if reason is None and method in _NEEDS_MODEL and not model:
        raise UserError(f"{method} needs a model", where=f"--against {name}", hint=f"write {method}:FOLDER")
    if reason is None and method in _PACKAGES:
        module, part, requirement = _PACKAGES[method]
        if not _offers(module, part):
            reason = f"vLLM needs {requirement} for it, which is not installed"
    return MethodPlan(
        name=name,
        num_speculative_tokens=config["num_speculative_tokens"],
        speculative_config=config,
        reason=reason,
    )


def _offers(module: str, part: str) -> bool:
    """Whether an installed package has a folder of that name. Does not import it."""
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec is not None else None
    return any(Path(place, part).is_dir() for place in places or ())


def _options(name: str) -> tuple[str, dict[str, Any]]:
    """A name without its options, and those as vLLM's ``speculative_config`` takes them.

    Raises:
        UserError: the installed vLLM has no such key, or the value is no YAML.
    """
    import yaml

    parts = name.split(":")
    options: dict[str, Any] = {}
    while len(parts) > 1 and (match := _OPTION.fullmatch(parts[-1])):
        key, known = match["key"], speculative_keys()
        if known is not None and key not in known:
            near = did_you_mean(key, known)
            raise UserError(f"vLLM {vllm_version()} has no option {key!r}", where=f"--against {name}", hint=near)
        try:
            options = {key: yaml.safe_load(match["value"]), **options}
        except yaml.YAMLError as error:
            raise UserError(f"the value of {key} is no YAML: {error}", where=f"--against {name}") from error
        parts.pop()
    return ":".join(parts), options
