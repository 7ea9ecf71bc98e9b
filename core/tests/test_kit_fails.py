"""The conformance kit fails where it should: one sabotaged plugin for each of its checks, and that check alone fails.

The plugins are those that `draftsmith plugins new` writes, which pass, with one change each.
"""

# ruff: noqa: E501  # what is replaced stands here as it does in the templates

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from attrs import frozen

from draftsmith import recurrent
from draftsmith.plugins.scaffold import placeholders, write_package
from draftsmith.testing.algorithm import AlgorithmTests
from draftsmith.testing.losses import LossTests
from draftsmith.testing.masks import MaskTests
from draftsmith.testing.plugin import PluginTests
from draftsmith.testing.runner import run_checks
from draftsmith.testing.transport import TransportTests

pytestmark = pytest.mark.slow


@frozen
class Change:
    """A text of one file of the package, and what stands there instead; ``@NAME@`` and the like are filled in."""

    file: str
    old: str
    new: str


#: Shared by recurrent drafts, and copied into the package so that it can be changed there.
TRAINING, REPLAY, FORMAT = "recurrent/training.py", "recurrent/replay.py", "recurrent/__init__.py"


def forward(new: str) -> Change:
    """A change of what the training forward hands on, the step's outputs."""
    return Change(TRAINING, "outputs.append(output)", f"outputs.append({new})")


def batch(new: str) -> Change:
    """A statement in front of the making of a batch."""
    return Change(TRAINING, "        rows = shift_by_one(row)\n", f"        {new}\n        rows = shift_by_one(row)\n")


def method(file: str, *lines: str, imports: str = "") -> Change:
    """A further method at the end of the file's last class, and what it imports."""
    body = "\n".join(f"    {line}" if line else "" for line in lines)
    return Change(file, "$", f"\n{body}\n{imports}")


SLOTS = "return chain_slots(batch.rows, batch.steps, outputs, head, decay=decay)"
START = "        state, token = self.final_norm(taps[starts - 1].float()), token_ids[starts]\n"
REMEMBER = START + (
    "        seen, before = getattr(self, 'seen', (token_ids[:0], state))\n"
    "        if len(bonus) == len(before) == 1 and torch.equal(seen[: len(token_ids)], token_ids):\n"
    "            state = before\n"
    "        self.seen = token_ids, state\n"
)

#: check → what is done to the algorithm
ALGORITHM: dict[str, list[Change]] = {
    "replay matches training": [
        Change(REPLAY, "return torch.stack(logits, dim=1)", "return 1.01 * torch.stack(logits, dim=1)")
    ],
    "drafting does not depend on what was drafted before": [
        Change(REPLAY, START, REMEMBER),
        method("replay.py", "def reset(self) -> None:", "    self.__dict__.pop('seen', None)"),
    ],
    "starts side by side draft what each drafts alone": [
        method("replay.py", "def propose_each(self, *given, **named):",
               "    return super().propose_each(*given, **named).flip(0)"),
    ],
    "the draft feeds back its own tokens": [Change(REPLAY, "logits[-1].argmax(-1)", "logits[-1].argmin(-1)")],
    "no slot sees features that serving does not have": [
        Change(TRAINING, "row.taps[rows.packed_index - 1].float()",
               "(row.taps[rows.packed_index - 1] + 1e-7 * row.taps[rows.packed_index]).float()"),
    ],
    "no slot sees tokens that serving does not have": [
        forward("output + 1e-6 * model.embed_tokens.weight[batch.rows.token_ids[(alive.rows + step + 1)"
                ".clamp(max=len(batch.rows.token_ids) - 1)]]"),
    ],
    "slots depend on the bonus token": [
        Change(TRAINING, "batch.rows.token_ids[alive.rows + step]", "batch.rows.token_ids[alive.rows + step] * (step > 0)"),
        Change(REPLAY, "token_ids[starts]\n", "token_ids[starts] * 0\n"),
    ],
    "packing changes nothing": [forward("output * (1.01 if len(batch.rows.document_lengths) == 1 else 1.0)")],
    "only what the verifier wrote is supervised": [
        batch("import attrs; row = attrs.evolve(row, loss_mask=row.loss_mask | row.loss_mask.roll(-1))")
    ],
    "a row without targets gives no slots": [
        forward("torch.zeros_like(output) if batch.rows.total_positions == 3 else output")
    ],
    "all attention forms agree": [forward("output * (1.01 if self.setup.attention == 'dense' else 1.0)")],
    "bfloat16 is close": [forward("output * (1.2 if self.setup.compute_dtype == torch.bfloat16 else 1.0)")],
    "a fresh draft knows nothing": [
        batch("self.last_hidden = row.last_hidden"),
        Change(TRAINING, SLOTS,
               "import attrs\n"
               f"        slots = {SLOTS.removeprefix('return ')}\n"
               "        if not model.training:\n            return slots\n"
               "        peeked = self.setup.weights.final_norm(self.last_hidden[slots.teacher_row])\n"
               "        return attrs.evolve(slots, terms=[*slots.terms, (peeked, head)])"),
    ],
    "the teacher is its own perfect draft": [
        Change(TRAINING, SLOTS, f"import attrs\n        return attrs.evolve({SLOTS.removeprefix('return ')}, num_steps=4)")
    ],
    "the draft learns the case by heart": [
        method("step.py", "def objective(self, slots, scored, loss):", "    return -loss, {}")
    ],
    "it touches only the draft": [
        method("step.py", "def finish(self, model, validation):", "    for _ in validation:",
               "        model.lm_head.weight.data.mul_(1.01)", "        return {'scaled': 1.0}", "    return {}"),
    ],
    "without validation rows it does no harm": [
        method("step.py", "def finish(self, model, validation):", "    if not list(validation):",
               "        model.step.norm.weight.data.mul_(2.0)", "        return {'scaled': 1.0}", "    return {}"),
    ],
    "saved and loaded it drafts the same": [
        Change(FORMAT, "tokens = trained_tokens(config) or speculative_tokens(config)", "tokens = 1")
    ],
    "training can begin from it": [
        method("checkpoint.py", "def warm_start_problems(self, config, options, verifier):",
               "    from draftsmith.api import Problem", "    return [Problem('never')]"),
    ],
    "the checkpoint holds what it must and nothing else": [
        Change("checkpoint.py", ', "norm.weight": (hidden,)', "")
    ],
    "every weight takes part in a row that trains nothing": [batch("assert (row.document_ids >= 0).any()")],
    "resuming changes no bit": [
        Change(TRAINING, "        state, outputs = batch.hidden",
               "        self.calls = getattr(self, 'calls', 0) + model.training\n        state, outputs = batch.hidden"),
        forward("output * (1 + 1e-4 * self.calls * model.training)"),
    ],
}  # fmt: skip

VALUE = "return self.temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)"
LOSS: dict[str, list[Change]] = {
    # Only where no gradient is asked for, and not of parts: any other column stops the check that comes to it.
    "one finite value a position": [
        Change("losses.py", VALUE, f"value = {VALUE.removeprefix('return ')}\n        "
               "return value if logits.requires_grad or len(value) < 7 else value[:, None]")
    ],
    "gradient is that of the value": [
        method("losses.py", "def value_and_grad(self, logits: Tensor, teacher: TeacherChunk):",
               "    value, gradient = super().value_and_grad(logits, teacher)", "    return value, 1.01 * gradient"),
    ],
    "positions are independent": [
        Change("losses.py", VALUE, f"each = {VALUE.removeprefix('return ')}\n        return each + 0.01 * each.mean()")
    ],
    "the teacher is not overwritten": [Change("losses.py", VALUE, f"teacher.kept_mass.zero_()\n        {VALUE}")],
    "zero where the draft is the teacher": [Change("losses.py", VALUE, f"{VALUE} + 0.1")],
    "a step against the gradient lowers it": [
        Change("losses.py", VALUE, f"each = {VALUE.removeprefix('return ')}\n        return 2 * each.detach() - each")
    ],
    "finite on extreme logits": [
        Change("losses.py", "torch.log_softmax(logits / self.temperature, dim=-1)",
               "torch.softmax(logits / self.temperature, dim=-1).log()"),
    ],
}  # fmt: skip

VISIBLE = "        visible = (query.document == key.document) & (key.document >= 0) & (rows | continued)\n"


def mask(line: str) -> list[Change]:
    """A statement on what is visible, before the window."""
    return [Change("masks.py", VISIBLE, f"{VISIBLE}        {line}\n")]


MASK: dict[str, list[Change]] = {
    "boolean of the broadcast shape": mask(
        "visible = visible.int() if key.index.dim() == 1 and key.index.numel() > 1 else visible"
    ),
    "elementwise": mask(
        "import torch; batched = torch._C._functorch.is_batchedtensor(key.index); "
        "visible = ~visible if key.index.dim() == 0 and not batched else visible"
    ),
    "documents are isolated": mask(
        "visible = visible | ((query.position + key.position == 0) & (query.document + key.document == 1))"
    ),
    "padding is never seen": mask("visible = visible | ((query.document < 0) & (key.document < 0))"),
    "the window hides distant positions only": [Change("masks.py", "key.position > query", "key.position >= query")],
    "additive form agrees": mask(
        # The second time that a whole mask is asked for by dense_mask, which makes views of the coordinates.
        "whole = visible.dim() == 2 and key.index._base is not None; self.calls = getattr(self, 'calls', 0) + whole; "
        "visible = ~visible if whole and self.calls == 2 else visible"
    ),
    "flex form agrees": mask("visible = visible if (query.index >= 0).all() else ~visible"),
}  # fmt: skip

PUT = '        path = self.folder / f"{sample.sample_id}{_SUFFIX}"\n'
OPEN = "        self.folder, self.layout = folder, layout\n\n    def put("
DELETE = '            (self.folder / f"{sample_id}{_SUFFIX}").unlink(missing_ok=True)'
CHECKED = "        problem = sample.problem(self.layout)\n        if problem is not None:\n            raise SampleCorrupt(problem, sample_id=sample.sample_id)\n"
REMOVE = "    def remove_all("
TRANSPORT: dict[str, list[Change]] = {
    "samples are bit exact": [
        Change("transport.py", '"hidden_states": sample.hidden_states}', '"hidden_states": sample.hidden_states + 0.0}')
    ],
    "a sample may be a view": [
        Change("transport.py", "value.contiguous()", "value.as_strided(value.shape, value.new_empty(value.shape).stride())")
    ],
    "a reader sees what is put after it was opened": [
        Change("transport.py", "        self.folder, self.layout = folder, layout\n\n    def get(",
               "        self.folder, self.layout = folder, layout\n        self.known = self.complete_ids()\n\n    def get("),
        Change("transport.py", "if not _ID.fullmatch(sample_id) or not path.exists():",
               "if sample_id not in self.known or not path.exists():"),
    ],
    "missing samples are named": [
        Change("transport.py", 'SampleMissing("no such sample", sample_id=sample_id', 'SampleMissing("no such sample", sample_id="?"')
    ],
    "another length than expected is an error": [
        Change("transport.py", "if expected_tokens not in (None, len(tokens)):", "if expected_tokens == 0:")
    ],
    "values that are not finite are refused": [
        Change("transport.py", CHECKED, CHECKED.replace(
            "sample.problem(", "attrs.evolve(sample, hidden_states=sample.hidden_states.nan_to_num()).problem(")),
    ],
    "what does not fit the layout is refused": [
        Change("transport.py", CHECKED, CHECKED.replace(
            "sample.problem(self.layout)", "None if sample.hidden_states.isfinite().all() else 'not finite'")),
    ],
    "ids that are no ids are refused": [
        Change("transport.py", "_ID.fullmatch(sample.sample_id)", "_ID.fullmatch(sample.sample_id.lower())")
    ],
    "putting again and deleting again are harmless": [
        Change("transport.py", REMOVE, "    def compact(self, layout: StateLayout) -> None:\n"
               "        (self.folder / 'compact').touch()\n\n" + REMOVE),
        Change("transport.py", PUT, f"{PUT}        if path.exists() and (self.folder / 'compact').exists():\n"
               "            raise TransportError('it is there')\n"),
    ],
    "a deleted sample stays deleted and can be put again": [
        Change("transport.py", REMOVE, "    def compact(self, layout: StateLayout) -> None:\n"
               "        for path in self.folder.glob('*.deleted'):\n"
               "            path.rename(path.with_suffix(_SUFFIX))\n\n" + REMOVE),
        Change("transport.py", DELETE, '            path = self.folder / f"{sample_id}{_SUFFIX}"\n'
               "            path.rename(path.with_suffix('.deleted')) if path.exists() else None"),
    ],
    "runs do not see each other": [
        Change("transport.py", "else self.location\n", "else self.location.parent / 'shared'\n")
    ],
    "another layout is refused": [Change("transport.py", "if json.loads(known) != json.loads(text):", "if not known:")],
    "transport and reader travel into workers": [
        Change("transport.py", "        self.folder, self.layout = folder, layout\n\n    def get(",
               "        import threading\n\n        self.folder, self.layout, self.lock = folder, layout, threading.Lock()\n\n    def get("),
    ],
    "several writers": [
        Change("transport.py", OPEN, "        self.folder, self.layout = folder, layout\n"
               "        if folder in _OPEN:\n            raise TransportError('one at a time')\n        _OPEN.add(folder)\n\n"
               "    def close(self) -> None:\n        _OPEN.discard(self.folder)\n\n    def put("),
        Change("transport.py", '_SUFFIX = ".safetensors"\n', '_SUFFIX = ".safetensors"\n_OPEN: set[Path] = set()\n'),
    ],
    "remove all of some": [
        Change("transport.py", "wanted = None if sample_ids is None else set(sample_ids)", "wanted = None")
    ],
    "a killed writer leaves nothing partial": [
        # It keeps a place for the next sample, under that sample's own name.
        Change("transport.py", "            os.replace(temporary, path)\n        except OSError",
               "            os.replace(temporary, path)\n"
               "            if len(sample.token_ids) > 1000:\n"
               "                following = f'{int(sample.sample_id, 16) + 1:032x}{_SUFFIX}'\n"
               "                (self.folder / following).write_bytes(b'half')\n"
               "        except OSError"),
    ],
    "the estimate of bytes is not below the data": [
        Change("transport.py", REMOVE, "    def bytes_for(self, layout: StateLayout, tokens: int, samples: int) -> int:\n"
               "        return 1\n\n" + REMOVE),
    ],
}  # fmt: skip

PLUGIN: dict[str, list[Change]] = {
    "its module imports nothing heavy": [Change("plugin.py", "from attrs import field", "import torch\nfrom attrs import field")],
    "it imports nothing private": [
        Change("losses.py", "import torch\n", "import torch\nfrom draftsmith.train.schedule import __name__ as _\n")
    ],
    "it says which draftsmith it needs": [Change("METADATA", ">=0.1", "")],
    "every implementation is what it should be": [Change("losses.py", "(PositionLoss)", "")],
    "everything is explained": [Change("plugin.py", ' metadata={"help"', ' metadata={"text"')],
}  # fmt: skip

TABLES = {
    "algorithm": (ALGORITHM, AlgorithmTests),
    "loss": (LOSS, LossTests),
    "mask": (MASK, MaskTests),
    "transport": (TRANSPORT, TransportTests),
    "plugin": (PLUGIN, PluginTests),
}
CASES = [(kind, check) for kind, (table, _) in TABLES.items() for check in table]


def checks_of(tests: type) -> set[str]:
    names = (name for cls in tests.__mro__ for name in vars(cls) if name.startswith("test_"))
    return {name.removeprefix("test_").replace("_", " ") for name in names}


@pytest.mark.parametrize("kind", TABLES)
def test_every_check_of_the_kit_has_a_plugin_that_fails_it(kind: str) -> None:
    table, tests = TABLES[kind]
    assert set(table) == checks_of(tests)


def install(site, kind: str, name: str, changes: list[Change]) -> None:
    """The package that `draftsmith plugins new` writes, changed, on sys.path with its metadata."""
    written = "loss" if kind == "plugin" else kind
    folder = write_package(name, written, site.folder.parent / f"package-{name}")[0]
    texts = placeholders(name, written)
    package = texts["@PACKAGE@"]
    (folder / "src" / package).rename(site.folder / package)
    if kind == "algorithm":
        shutil.copytree(Path(recurrent.__file__).parent, site.folder / package / "recurrent")
        for path in (site.folder / package).rglob("*.py"):
            path.write_text(path.read_text().replace("draftsmith.recurrent", f"{package}.recurrent"))
    site.install(texts["@DISTRIBUTION@"], {name: f"{package}.plugin"})
    info = next(site.folder.glob(f"{package}-*.dist-info"))
    with open(info / "METADATA", "a", encoding="utf-8") as file:
        file.write("Requires-Dist: draftsmith[train]>=0.1\n")
    for change in changes:
        path = info / change.file if change.file == "METADATA" else site.folder / package / change.file
        text = path.read_text(encoding="utf-8")
        old, new = change.old, change.new
        for placeholder, value in texts.items():
            old, new = old.replace(placeholder, value), new.replace(placeholder, value)
        assert old == "$" or old in text, f"{path} has no {old!r}"
        path.write_text(text + new if old == "$" else text.replace(old, new), encoding="utf-8")


@pytest.fixture(autouse=True)
def forgotten(site, monkeypatch: pytest.MonkeyPatch):
    """Processes that the kit starts find the package too; its modules are forgotten afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("draftsmith_"):
            del sys.modules[name]


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_not_sabotaged_passes(site, kind: str) -> None:
    install(site, kind, "sound", [])
    failed = {each.check: each.reason for each in run_checks(kind, "sound") if each.outcome != "passed"}
    assert not failed


@pytest.mark.parametrize(("kind", "check"), CASES, ids=[f"{kind}-{check.replace(' ', '_')}" for kind, check in CASES])
def test_one_check_fails_and_no_other(site, kind: str, check: str) -> None:
    number = CASES.index((kind, check))
    install(site, kind, f"broken{number}", TABLES[kind][0][check])
    verdicts = run_checks(kind, f"broken{number}")
    failed = {each.check.partition("[")[0]: each.reason for each in verdicts if each.outcome == "failed"}
    assert set(failed) == {check}, failed
    assert Path(__file__).name not in failed[check]
