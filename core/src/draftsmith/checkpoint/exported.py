"""Exported checkpoints (config.json + safetensors): their files, their schema, and the draft in them.

Reading the config and the tensors' headers needs no torch; :func:`load_draft` does.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from draftsmith import api
from draftsmith.errors import CheckpointError, PluginConflictError, UnknownNameError
from draftsmith.interfaces import CheckpointFormat, Finding, TensorSpec
from draftsmith.plugins import load_reference
from draftsmith.plugins.manager import distribution_of
from draftsmith.plugins.results import check_draft, check_items, check_json, check_window, checked
from draftsmith.speculators import package_of
from draftsmith.stored_tensors import WEIGHTS, StoredTensor, read_file_header, tensor_files

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from draftsmith.interfaces import AlgorithmSetup, DraftAlgorithm, ExportContext, VocabularyMap
    from draftsmith.plugins import Catalog, PluginRegistry

__all__ = [
    "CONFIG",
    "OWN_KEY",
    "SCHEMA",
    "TEMPLATE_ARGUMENTS",
    "TRAINED_AS",
    "WEIGHTS",
    "StoredTensor",
    "algorithm_for",
    "load_draft",
    "open_format",
    "read_config",
    "read_header",
    "read_tensor",
    "read_tensors",
    "schema_for",
    "template_arguments_of",
    "unread_files",
    "verifier_of",
    "vocabulary_of",
]

CONFIG = "config.json"
#: Top-level key of config.json for what vLLM does not ask for: how the draft was trained. vLLM ignores it.
OWN_KEY = api.PROJECT_NAME
#: Key below that one: the algorithm's options as the format read them from the config when it was exported.
TRAINED_AS = "trained_as"
#: Key below that one: the checkpoint schema that wrote the config, where several read its type.
SCHEMA = "schema"
#: Key below that one: arguments of the chat template that the data were rendered with, where there were any.
TEMPLATE_ARGUMENTS = "template_arguments"

_INTEGER_FORMATS = {"I64": "q", "I32": "i", "U8": "B", "BOOL": "?"}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported checkpoint.

    Raises:
        CheckpointError: it is missing, or no JSON object.
    """
    path = folder / CONFIG
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "is this the folder of an exported checkpoint?" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"there is no {CONFIG}", where=str(folder), hint=hint) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=str(path), hint="export again") from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", where=str(path), hint="export again")
    return value


def read_header(folder: Path) -> dict[str, StoredTensor]:
    """Name → place, shape and dtype of every tensor, from the safetensors headers alone.

    Raises:
        CheckpointError: no weights, or a file that is cut or damaged.
    """
    files = tensor_files(folder)
    return {name: tensor for file in files for name, tensor in read_file_header(file).items()}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint in *folder*.

    Raises:
        CheckpointError: no weights, or a file that is cut or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted({tensor.file for tensor in read_header(folder).values()})
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights cannot be read: {error}", where=str(folder)) from error


def read_tensor(tensor: StoredTensor) -> list[int]:
    """The values of a small one-dimensional tensor of integers or booleans, without torch.

    Raises:
        CheckpointError: another dtype.
    """
    code = _INTEGER_FORMATS.get(tensor.spec.dtype or "")
    if code is None:
        raise CheckpointError(f"no integer tensor: {tensor.spec.dtype}", where=str(tensor.file))
    with open(tensor.file, "rb") as file:
        file.seek(tensor.begin)
        data = file.read(tensor.end - tensor.begin)
    return [int(value) for (value,) in struct.iter_unpack(f"<{code}", data)]


def schema_for(config: Mapping[str, Any], registry: PluginRegistry, where: str | None = None) -> api.CheckpointSchema:
    """The schema that reads this config: of several, that which wrote it.

    Raises:
        UnknownNameError: no installed plugin reads its ``speculators_model_type``; says which distribution may.
        PluginError: the one that would is broken or switched off.
        PluginConflictError: several do, and the config does not say which of them wrote it.
        CheckpointError: the key is missing.
    """
    kind = config.get("speculators_model_type")
    if not isinstance(kind, str) or not kind:
        raise CheckpointError(
            "speculators_model_type is missing: nobody can tell which kind of draft this is",
            where=where,
            hint="some other projects' drafts are brought into this format by the speculators library (`speculators "
            "convert`), and training begins from some as they are (train.warm_start)",
        )
    readers = [each for each in registry.schemas if kind in each.speculators_types]
    readers = [each for each in readers if each.name == _own(config).get(SCHEMA)] or readers
    if len(readers) > 1:
        raise _ambiguous("speculators_model_type", kind, readers, registry.schemas, where, SCHEMA)
    if readers:
        return registry.schemas.get(readers[0].name)
    known = [each for schema in registry.schemas for each in schema.speculators_types]
    package = package_of(config) or distribution_of(kind)
    if reason := registry.reason(package):  # it is installed, and broken or switched off
        raise reason
    raise UnknownNameError(
        "speculators_model_type",
        kind,
        known,
        where=where,
        hint=f"the plugin that reads it may be missing: pip install {package}",
    )


def _ambiguous(
    what: str, value: str, items: Sequence[api.Item], catalog: Catalog[Any], where: str | None, key: str
) -> PluginConflictError:
    """The error for a checkpoint that several plugins' items of one kind may be meant by."""
    providers = [catalog.provider(each.name) for each in items]
    claims = [
        f"plugin {who.plugin!r} of {who} ({catalog.kind} {each.name!r})"
        for each, who in zip(items, providers, strict=True)
    ]
    off = " or ".join(dict.fromkeys(f"--no-plugin {who.plugin}" for who in providers))
    return PluginConflictError(
        f"{what} {value!r} is claimed by {' and '.join(claims)}",
        where=where,
        hint=f"switch one off, {off}; or write {OWN_KEY}.{key}: {items[0].name!r}, say, into {CONFIG}, as an export "
        f"of a recipe with {key}: {items[0].name} does",
    )


def open_format(schema: api.CheckpointSchema) -> CheckpointFormat:
    """The implementation of a schema."""
    opened: CheckpointFormat = load_reference(schema.implementation, expected=CheckpointFormat)()
    return _CheckedFormat(opened)


class _CheckedFormat(CheckpointFormat):
    """A format whose answers are held against its interface."""

    def __init__(self, format_: CheckpointFormat) -> None:
        self._format = format_
        self.native = format_.native  # type: ignore[misc]  # a class's own, of the other class

    def config(self, context: ExportContext) -> dict[str, Any]:
        asked = self._format.config
        found: dict[str, Any] = check_json(asked, asked(context), "config.json as a dict that JSON can carry")
        return found

    def tensors(self, model: nn.Module, context: ExportContext) -> dict[str, Tensor]:
        from torch import Tensor

        asked = self._format.tensors
        return checked(asked, asked(model, context), dict, "a dict of exported name → tensor", of=Tensor)

    def expected_tensors(self, config: Mapping[str, Any]) -> Mapping[str, TensorSpec]:
        asked = self._format.expected_tensors
        return checked(asked, asked(config), Mapping, "exported name → TensorSpec", of=TensorSpec)

    def as_loaded(self, config: Mapping[str, Any], present: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        asked = self._format.as_loaded
        return checked(asked, asked(config, present), Mapping, "name → TensorSpec", of=TensorSpec)

    def lint(
        self, config: Mapping[str, Any], present: Mapping[str, TensorSpec], verifier: api.VerifierFacts | None
    ) -> Sequence[Finding]:
        return check_items(self._format.lint, self._format.lint(config, present, verifier), Finding)

    def unread_files(self, config: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, str]:
        asked = self._format.unread_files
        return checked(asked, asked(config, names), Mapping, "file name → what vLLM does with it", of=str)

    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self._format.load(model, tensors, config)

    def warm_start_problems(
        self, config: Mapping[str, Any], options: Any, verifier: api.VerifierFacts
    ) -> Sequence[api.Problem]:
        asked = self._format.warm_start_problems
        return check_items(asked, asked(config, options, verifier), api.Problem)

    def warm_start(self, model: nn.Module, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Sequence[str]:
        asked = self._format.warm_start
        return check_items(asked, asked(model, tensors, config), str)

    def options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        asked = self._format.options
        return checked(asked, asked(config), dict, "a dict of the algorithm's options")

    def capture(self, config: Mapping[str, Any], verifier: api.VerifierFacts) -> api.CaptureRequirements:
        asked = self._format.capture
        expected = "draftsmith.api.CaptureRequirements"
        return checked(asked, asked(config, verifier), api.CaptureRequirements, expected)

    def serving(self, config: Mapping[str, Any]) -> api.ServingPlan:
        asked = self._format.serving
        return checked(asked, asked(config), api.ServingPlan, "draftsmith.api.ServingPlan")


def unread_files(folder: Path, config: Mapping[str, Any], format_: CheckpointFormat) -> list[str]:
    """What vLLM takes from files of the checkpoint in *folder* that are not read here, a sentence each. Torch-free."""
    found = format_.unread_files(config, sorted(each.name for each in folder.iterdir()))
    return [f"{name} is not read here, and vLLM {what}" for name, what in found.items()]


def algorithm_for(
    config: Mapping[str, Any], schema: api.CheckpointSchema, registry: PluginRegistry, where: str | None = None
) -> api.Algorithm:
    """The algorithm that made the checkpoint, or else one that exports to its schema.

    Raises:
        UnknownNameError: none does.
        PluginConflictError: several do, and the config does not say which of them made it.
    """
    fitting = [each for each in registry.algorithms if each.schema == schema.name]
    for name in (_own(config).get("algorithm"), config.get("speculators_model_type")):
        if isinstance(name, str) and name in registry.algorithms:
            return registry.algorithms.get(name)
    if len(fitting) > 1:
        kind = str(config.get("speculators_model_type"))
        raise _ambiguous("a checkpoint of type", kind, fitting, registry.algorithms, where, "algorithm")
    if fitting:
        return fitting[0]
    raise UnknownNameError(
        "algorithm", str(config.get("speculators_model_type")), registry.algorithms.names(), where=where
    )


def _own(config: Mapping[str, Any]) -> Mapping[str, Any]:
    own = config.get(OWN_KEY)
    return own if isinstance(own, Mapping) else {}


def verifier_of(config: Mapping[str, Any], where: str | None = None) -> str:
    """Name or path of the verifier that the checkpoint was made for.

    Raises:
        CheckpointError: the config does not say.
    """
    try:
        name = config["speculators_config"]["verifier"]["name_or_path"]
    except (KeyError, TypeError):
        name = None
    if not isinstance(name, str) or not name:
        raise CheckpointError("speculators_config.verifier.name_or_path is missing", where=where, hint="export again")
    return name


def template_arguments_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of the chat template that the draft's data were rendered with, as noted at export."""
    noted = _own(config).get(TEMPLATE_ARGUMENTS)
    return noted if isinstance(noted, Mapping) else {}


def vocabulary_of(tensors: Mapping[str, Tensor], target_size: int) -> VocabularyMap:
    """The draft vocabulary of a checkpoint: its ``d2t``, or the identity."""
    import torch

    from draftsmith.interfaces import VocabularyMap

    d2t = tensors.get("d2t")
    if d2t is None:
        return VocabularyMap(
            d2t=torch.zeros(target_size, dtype=torch.int64), t2d=torch.ones(target_size, dtype=torch.bool)
        )
    kept = d2t.long() + torch.arange(d2t.shape[0])
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[kept] = True
    return VocabularyMap(d2t=d2t.long(), t2d=t2d)


def load_draft(
    folder: Path,
    registry: PluginRegistry,
    *,
    verifier: Path | None = None,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> tuple[DraftAlgorithm, nn.Module, dict[str, Any]]:
    """Rebuild the draft from config.json, the exported tensors and the verifier alone, as vLLM does.

    Args:
        folder: of the exported checkpoint.
        verifier: folder of the verifier; None takes the one named in the config.
        compute_dtype: of matrix products; None is float32.

    Returns:
        The algorithm (with its setup), the draft in evaluation mode on *device*, and the config.

    Raises:
        CheckpointError, UnknownNameError, VerifierError: what cannot be read, and where.
    """
    config = read_config(folder)
    where = str(folder / CONFIG)
    schema = schema_for(config, registry, where)
    algorithm = algorithm_for(config, schema, registry, where)
    format_ = open_format(schema)
    for unread in unread_files(folder, config, format_):
        raise CheckpointError(f"{unread}: the draft would be another one than vLLM's", where=str(folder))
    tensors = read_tensors(folder)
    setup = _setup(
        config, where, algorithm, format_, tensors, registry, verifier, device, compute_dtype, trust_remote_code
    )
    from draftsmith.interfaces import DraftAlgorithm

    built: DraftAlgorithm = load_reference(algorithm.implementation, expected=DraftAlgorithm)(setup)
    model = check_draft(built, built.build_model())
    try:
        format_.load(model, tensors, config)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the tensors do not fit the config: {error}",
            where=str(folder),
            hint=f"see `{api.PROJECT_NAME} lint {folder}`",
        ) from error
    return built, model.to(device).eval(), config


def _setup(
    config: Mapping[str, Any],
    where: str,
    algorithm: api.Algorithm,
    format_: CheckpointFormat,
    tensors: Mapping[str, Tensor],
    registry: PluginRegistry,
    verifier: Path | None,
    device: torch.device | str,
    compute_dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> AlgorithmSetup:
    import torch

    from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture, MaskRule
    from draftsmith.verifier import read_verifier
    from draftsmith.verifier_weights import load_verifier_weights

    facts = read_verifier(verifier or verifier_of(config, where))
    options = _options(config, where, algorithm, format_)
    weights = load_verifier_weights(facts, trust_remote_code=trust_remote_code)
    mask = registry.masks.get(_facet(config, "mask", algorithm.mask, registry.masks.names()), where)
    architecture = registry.architectures.get(
        _facet(config, "architecture", algorithm.architecture, registry.architectures.names()), where
    )
    try:
        vocabulary = vocabulary_of(tensors, facts.vocab_size)
    except IndexError as error:
        raise CheckpointError("d2t leads outside the verifier's vocabulary", where=where) from error
    return AlgorithmSetup(
        options=options,
        verifier=facts,
        weights=attrs.evolve(
            weights,
            embed_tokens=weights.embed_tokens.to(device),
            lm_head=weights.lm_head.to(device),
            final_norm=weights.final_norm.to(device),
        ),
        vocabulary=attrs.evolve(vocabulary, d2t=vocabulary.d2t.to(device), t2d=vocabulary.t2d.to(device)),
        capture=format_.capture(config, facts),
        mask=load_reference(mask.implementation, expected=MaskRule)(window=check_window(algorithm, options)),
        architecture=load_reference(architecture.implementation, expected=DraftArchitecture),
        attention="auto",
        compute_dtype=compute_dtype or torch.float32,
    )


def _facet(config: Mapping[str, Any], key: str, default: str, known: list[str]) -> str:
    name = _own(config).get(key)
    return name if isinstance(name, str) and name in known else default


def _options(config: Mapping[str, Any], where: str, algorithm: api.Algorithm, format_: CheckpointFormat) -> Any:
    """The algorithm's options: what the format reads from the config decides; the rest is as noted at export."""
    from draftsmith.config.structure import INVALID, Structurer

    known = {each.name for each in attrs.fields(algorithm.options)}
    noted = _own(config).get("options")
    values = {key: value for key, value in (noted if isinstance(noted, Mapping) else {}).items() if key in known}
    structurer = Structurer()
    options = structurer.build(algorithm.options, {**values, **format_.options(config)})
    if options is INVALID or structurer.problems:
        raise CheckpointError(
            f"the config implies options that {algorithm.name} does not have: "
            + "; ".join(str(problem) for problem in structurer.problems),
            where=where,
        )
    return options
