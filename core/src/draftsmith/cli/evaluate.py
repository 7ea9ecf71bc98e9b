"""Measure a draft side by side with other methods, in vLLM: acceptance, speed, losslessness.

The exit code is 1 where a demand (--require) is not met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli import common
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.evaluation.run import Settings
    from draftsmith.plugins import PluginRegistry

__all__ = ["configure", "execute"]


def configure(parser: argparse.ArgumentParser) -> None:
    count = common.at_least(1)
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of the draft's checkpoint")
    parser.add_argument(
        "--prompts", metavar="SET", help="humaneval, another set, a JSONL or Parquet file (repeatable)", **several
    )
    parser.add_argument("--max-prompts", metavar="N", type=count, help="of each set, at even distances")
    parser.add_argument(
        "--against",
        metavar="METHODS",
        help="none, CHECKPOINT, METHOD or METHOD:MODEL, separated by commas; default: none",
        **several,
    )
    parser.add_argument(
        "--server", metavar="URL", help="a running server of the checkpoint; METHOD=URL of another method", **several
    )
    parser.add_argument("--verifier", metavar="PATH", help="the verifier; default: the one that the checkpoint names")
    parser.add_argument("--speculative-tokens", metavar="K", type=count, help="of all methods")
    parser.add_argument("--max-tokens", metavar="N", type=count, default=128, help="longest answer; default: 128")
    parser.add_argument("--repetitions", metavar="N", type=count, default=3, help="default: 3")
    parser.add_argument(
        "--warm-up", metavar="N", type=common.at_least(0), default=2, help="uncounted answers before each; default: 2"
    )
    parser.add_argument("--concurrency", metavar="N", type=count, default=8, help="requests at once; default: 8")
    parser.add_argument(
        "--temperature", metavar="T", type=common.number(float, 0.0), default=0.0, help="default: 0, greedy"
    )
    parser.add_argument("--top-p", metavar="P", type=common.number(float, 1e-6, 1.0), default=1.0, help="default: 1")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling; default: 0")
    parser.add_argument("--draft-sample-method", choices=("greedy", "probabilistic"), help="default: vLLM's")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--simulate", action="store_true", help="count with the simulator as well, or without vLLM")
    parser.add_argument("--skip-long-prompts", action="store_true", help="leave out those beyond the context")
    parser.add_argument("--engine", metavar="KEY=VALUE", help="a further argument of vLLM's engine", **several)
    parser.add_argument("--template", metavar="KEY=VALUE", help="an argument of the chat template", **several)
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the verifier")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="default: CHECKPOINT-evaluation")
    parser.add_argument("--overwrite", action="store_true", help="replace an evaluation of other inputs there")
    parser.add_argument(
        "--sweep", metavar="AXIS=VALUES", help="tokens=1..8 or concurrency=1,4,16; writes plan.json", **several
    )
    parser.add_argument("--show", metavar="N", type=count, help="show the N answers that gained least")
    parser.add_argument("--json", action="store_true", help="print evaluation.json in place of the table")
    parser.add_argument("--csv", action="store_true", help="print evaluation.csv in place of the table")
    parser.add_argument(
        "--require", metavar="DEMAND", help='such as "acceptance_length>=2.1"; exit code 1 if not met', **several
    )
    common.add_plugin_options(parser)


def execute(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from draftsmith.evaluation.require import check_methods, failures, parse_requirement
    from draftsmith.evaluation.results import as_csv, as_json
    from draftsmith.evaluation.run import evaluate, simulated_name

    if arguments.json and arguments.csv:
        raise UserError("--json and --csv exclude each other", hint="both files are in the evaluation's folder")
    demands = [parse_requirement(text) for text in arguments.require]
    settings = _settings(arguments)
    simulated = [simulated_name(settings.checkpoint)] if settings.simulate else []
    check_methods(demands, [settings.checkpoint, *(settings.servers or settings.against), *simulated])
    registry = common.open_registry(arguments.no_plugin)
    folder = arguments.output or Path(f"{arguments.checkpoint.rstrip('/')}-evaluation")
    if arguments.sweep:
        return _sweep(arguments, settings, registry, folder)
    plain = arguments.json or arguments.csv
    console = Console(stderr=plain)
    evaluation = evaluate(
        settings, registry, folder, console, command=["draftsmith", *sys.argv[1:]], overwrite=arguments.overwrite
    )
    if arguments.json:
        import json

        print(json.dumps(as_json(evaluation), indent=2, ensure_ascii=False))
    elif arguments.csv:
        print(as_csv(evaluation), end="")
    else:
        from draftsmith.evaluation.table import print_evaluation

        print_evaluation(console, evaluation)
        console.print(f"written: {folder}", markup=False, highlight=False, soft_wrap=True)
    if arguments.show:
        from draftsmith.evaluation.table import print_worst

        print_worst(console, evaluation, arguments.show)
    unmet = failures(demands, evaluation, settings.checkpoint)
    for why in unmet:
        print(f"not met: {why}", file=sys.stderr)
    return 1 if unmet or not evaluation.complete else 0


def _sweep(arguments: argparse.Namespace, settings: Settings, registry: PluginRegistry, folder: Path) -> int:
    from rich.console import Console

    from draftsmith.evaluation.sweep import PLAN, parse_sweep, print_sweep, run_sweep

    for name in ("require", "json", "csv", "show", "against"):
        if getattr(arguments, name):
            hint = "each of its evaluations has one: leave it out here"
            raise UserError("a sweep has no such thing", where=f"--{name}", hint=hint)
    axes = parse_sweep(arguments.sweep)
    console = Console()
    command = ["draftsmith", *sys.argv[1:]]
    sweep = run_sweep(settings, axes, registry, folder, console, command=command, overwrite=arguments.overwrite)
    print_sweep(console, sweep)
    console.print(f"written: {folder / PLAN}", markup=False, highlight=False, soft_wrap=True)
    return 0 if sweep.complete and sweep.plan else 1


def _settings(arguments: argparse.Namespace) -> Settings:
    from draftsmith.evaluation.methods import split_names
    from draftsmith.evaluation.results import BASELINE
    from draftsmith.evaluation.run import Settings

    return Settings(
        checkpoint=arguments.checkpoint,
        prompts=tuple(split_names(arguments.prompts)),
        against=tuple(split_names(arguments.against)) or (BASELINE,),
        max_prompts=arguments.max_prompts,
        verifier=arguments.verifier,
        num_speculative_tokens=arguments.speculative_tokens,
        servers=_servers(arguments),
        max_tokens=arguments.max_tokens,
        repetitions=arguments.repetitions,
        warm_up=arguments.warm_up,
        concurrency=arguments.concurrency,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        draft_sample_method=arguments.draft_sample_method,
        dtype=arguments.dtype,
        simulate=arguments.simulate,
        skip_long_prompts=arguments.skip_long_prompts,
        trust_remote_code=arguments.trust_remote_code,
        engine=_pairs(arguments.engine, "--engine"),
        template_arguments=_pairs(arguments.template, "--template"),
    )


def _servers(arguments: argparse.Namespace) -> dict[str, str]:
    """Method → address. Without a name it is the checkpoint's, which must be among them."""
    found: dict[str, str] = {}
    for text in arguments.server:
        name, equals, address = text.rpartition("=")
        name = name if equals else arguments.checkpoint
        if name in found:
            raise UserError(f"two servers of {name}", where="--server", hint="name the method: METHOD=URL")
        found[name] = address
    if not found:
        return {}
    if arguments.checkpoint not in found:
        raise UserError("no server of the checkpoint", where="--server", hint="name it without METHOD=")
    for option in ("against", "engine", "speculative_tokens", "draft_sample_method", "sweep"):
        if getattr(arguments, option):
            name = option.replace("_", "-")
            raise UserError("a running server has its own", where=f"--{name}", hint="leave it out, or start another")
    return found


def _pairs(given: Sequence[str], option: str) -> dict[str, Any]:
    """``KEY=VALUE``, the values being YAML."""
    import yaml

    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"cannot be read: {text!r}", where=option, hint=f"write {option} KEY=VALUE")
        try:
            found[key.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"the value is no YAML: {error}", where=f"{option} {key}") from error
    return found
