"""Recipes from YAML, overrides, provenance, and everything that can be wrong with them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs import field, frozen

from draftsmith.config.load import load_recipe
from draftsmith.config.schema import NamedConfig, Recipe
from draftsmith.config.structure import INVALID, Structurer, describe_type, field_types, plain
from draftsmith.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


MINIMAL = "verifier: v\nalgorithm: tinker\noutput: out\n"


def problems_of(tmp_path: Path, text: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    return {str(each.where): each for each in caught.value.problems}


def test_defaults_are_filled_in(tmp_path):
    loaded = load_recipe(write(tmp_path, MINIMAL))
    assert loaded.recipe == Recipe(verifier="v", algorithm=NamedConfig(name="tinker"), output="out")
    assert loaded.folder == tmp_path


@pytest.mark.parametrize(
    "text", ["algorithm: {name: tinker, options: {steps: 4}}", "algorithm:\n  name: tinker\n  options:\n    steps: 4"]
)
def test_both_forms_of_a_name(tmp_path, text):
    loaded = load_recipe(write(tmp_path, f"verifier: v\noutput: o\n{text}\n"))
    assert loaded.recipe.algorithm == NamedConfig(name="tinker", options={"steps": 4})


def test_overrides_win_and_are_yaml(tmp_path):
    loaded = load_recipe(
        write(tmp_path, MINIMAL + "train: {epochs: 2}\n"),
        ["train.epochs=5", "train.learning_rate=1e-4", "observers=[]", "algorithm.options.steps=7", "loss=ce"],
    )
    assert loaded.recipe.train.epochs == 5
    assert loaded.recipe.train.learning_rate == 1e-4
    assert loaded.recipe.observers == []
    assert loaded.recipe.algorithm == NamedConfig(name="tinker", options={"steps": 7})
    assert loaded.recipe.loss == NamedConfig(name="ce")


@pytest.mark.parametrize("override", ["train.betas=[2, 3]", "train.betas=[0.9, 1]", f"train.seed={2**63}"])
def test_what_torch_would_refuse_after_the_capture_is_refused_before(tmp_path, override):
    with pytest.raises(ConfigError, match="must be <"):
        load_recipe(write(tmp_path, MINIMAL), [override])


def test_provenance_of_each_value(tmp_path):
    loaded = load_recipe(
        write(tmp_path, MINIMAL + "train:\n  epochs: 2\n  seed: 1\n"), ["train.seed=3", "vocabulary.draft_size=9"]
    )
    expected = {
        "algorithm.name": "r.yaml:2",
        "train.epochs": "r.yaml:5",
        "train.seed": "--set",
        "vocabulary.draft_size": "--set",
        "train.clip_norm": "default",
        "loss": "default",
    }
    assert {key: loaded.provenance[key] for key in expected} == expected


def test_an_override_of_a_whole_section_leaves_nothing_of_the_file(tmp_path):
    loaded = load_recipe(write(tmp_path, MINIMAL + "train:\n  epochs: 2\n"), ["train={seed: 4}"])
    assert loaded.recipe.train.epochs == 3
    assert loaded.provenance["train.epochs"] == "default"
    assert loaded.provenance["train.seed"] == "--set"


def test_all_problems_are_reported_at_once_with_key_and_line(tmp_path):
    text = MINIMAL + (
        "epochs: 3\n"
        "data:\n"
        "  max_lenght: 100\n"
        "  max_length: 3\n"
        "train:\n"
        "  epochs: many\n"
        "  optimizer: adam\n"
        "  betas: [0.9]\n"
        "trust_remote_code: 'yes'\n"
    )
    found = problems_of(tmp_path, text, ("trian.a=2", "capture=3"))
    assert set(found) == {
        "r.yaml:4: epochs",
        "r.yaml:6: data.max_lenght",
        "r.yaml:7: data.max_length",
        "r.yaml:9: train.epochs",
        "r.yaml:10: train.optimizer",
        "r.yaml:11: train.betas",
        "r.yaml:12: trust_remote_code",
        "--set: trian",
        "--set: capture",
    }
    assert found["r.yaml:4: epochs"].hint == "did you mean 'train.epochs'?"
    assert found["r.yaml:6: data.max_lenght"].hint == "did you mean 'max_length'?"
    assert ">= 8" in found["r.yaml:7: data.max_length"].what
    assert found["r.yaml:9: train.epochs"].what == "must be integer, got 'many'"
    assert "adamw, muon" in found["r.yaml:10: train.optimizer"].hint
    assert found["--set: trian"].hint == "did you mean 'train'?"


def test_missing_required_keys_are_reported_together(tmp_path):
    found = problems_of(tmp_path, "train: {epochs: 1}\n")
    assert set(found) == {"r.yaml: verifier", "r.yaml: algorithm", "r.yaml: output"}
    assert "folder (or hub name)" in found["r.yaml: verifier"].hint


def test_a_tolerant_load_keeps_problems_and_defaults(tmp_path):
    loaded = load_recipe(write(tmp_path, MINIMAL + "train: {epochs: x, seed: 4}\n"), strict=False)
    assert [each.where for each in loaded.problems] == ["r.yaml:4: train.epochs"]
    assert loaded.broken == {"train.epochs"}
    assert loaded.recipe.train.seed == 4


def test_a_key_given_twice_is_an_error(tmp_path):
    found = problems_of(tmp_path, MINIMAL + "output: other\n")
    assert found["r.yaml:4: output"].hint == "first in line 3"


@pytest.mark.parametrize("override", ["train.epochs", "=3", "train..epochs=3", "train.epochs=[1", "output.x.y=1"])
def test_an_override_that_cannot_be_applied(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert any("--set" in str(each.where) for each in caught.value.problems)


def test_a_missing_recipe_names_those_that_are_there(tmp_path):
    write(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"no such recipe[\s\S]*r\.yaml"):
        load_recipe(tmp_path / "rr.yaml")
    with pytest.raises(ConfigError, match="no folder"):
        load_recipe(tmp_path / "nowhere" / "r.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"verifier: [1\n", r"r\.yaml:2:1: the recipe is not valid YAML"),
        (b"- 1\n- 2\n", "must be a mapping"),
        (b"verifier: \xff\n", "not UTF-8"),
        (b"a: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_an_empty_file_lacks_everything(tmp_path):
    assert len(problems_of(tmp_path, "")) == 3


def test_dates_stay_as_they_are_written(tmp_path):
    text = MINIMAL + "data: {template_arguments: {date_string: 2024-07-26}}\n"
    recipe = load_recipe(write(tmp_path, text), ["data.template_arguments.today=2024-07-27"]).recipe
    assert recipe.data.template_arguments == {"date_string": "2024-07-26", "today": "2024-07-27"}


def test_the_recipe_survives_a_round_trip(tmp_path):
    import yaml

    recipe = load_recipe(write(tmp_path, MINIMAL + "loss: {name: sum, options: {terms: {ce: 1.0}}}\n")).recipe
    again = load_recipe(write(tmp_path, yaml.safe_dump(plain(recipe)))).recipe
    assert again == recipe


def test_every_key_of_the_schema_has_a_type_and_a_description():
    def walk(cls: type, prefix: str = "") -> None:
        kinds = field_types(cls)
        for each in attrs.fields(cls):
            if isinstance(kinds[each.name], type) and attrs.has(kinds[each.name]) and each.name != "algorithm":
                walk(kinds[each.name], f"{prefix}{each.name}.")
            else:
                assert each.metadata.get("help"), f"{prefix}{each.name}"
                assert describe_type(kinds[each.name])

    walk(Recipe)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@frozen(kw_only=True)
class Inner:
    size: int = 1


@frozen(kw_only=True)
class Everything:
    number: float = 1.0
    whole: int = 1
    flag: bool = False
    text: str = ""
    maybe: int | None = None
    either: int | str = 0
    choice: Literal["a", "b", 3] = "a"
    colour: Colour = Colour.RED
    many: list[int] = field(factory=list)
    pair: tuple[int, str] = (1, "x")
    row: tuple[float, ...] = ()
    names: frozenset[str] = frozenset()
    table: dict[str, float] = field(factory=dict)
    where: Path = Path()
    inner: Inner = field(factory=Inner)
    anything: Any = None
    low: int = 0
    high: int = field(default=10)

    @high.validator
    def _ordered(self, attribute: Any, value: int) -> None:
        if value < self.low:
            raise ValueError("high must not be below low")


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("number", 3, 3.0),
        ("number", "1e-4", 1e-4),
        ("whole", 2.0, 2),
        ("flag", True, True),
        ("maybe", None, None),
        ("maybe", 4, 4),
        ("either", "x", "x"),
        ("choice", 3, 3),
        ("colour", "blue", Colour.BLUE),
        ("many", [1, 2], [1, 2]),
        ("pair", [1, "x"], (1, "x")),
        ("row", [1, 2.5], (1.0, 2.5)),
        ("names", ["a", "a"], frozenset({"a"})),
        ("table", {"a": 1}, {"a": 1.0}),
        ("where", "/x", Path("/x")),
        ("inner", {"size": 3}, Inner(size=3)),
        ("anything", {"x": [1]}, {"x": [1]}),
    ],
)
def test_values_become_the_type_of_their_field(name, given, value):
    structurer = Structurer()
    built = structurer.build(Everything, {name: given})
    assert structurer.problems == []
    assert getattr(built, name) == value
    assert type(getattr(built, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("number", "fast"),
        ("number", True),
        ("whole", 2.5),
        ("whole", "2"),
        ("whole", True),
        ("flag", 1),
        ("flag", "yes"),
        ("text", 5),
        ("text", None),
        ("maybe", "x"),
        ("either", 2.5),
        ("choice", "c"),
        ("choice", "3"),
        ("colour", "green"),
        ("many", 1),
        ("many", [1, "x"]),
        ("pair", [1]),
        ("pair", [1, 2]),
        ("table", [1]),
        ("table", {"a": "b"}),
        ("table", {1: 2.0}),
        ("inner", {"sise": 1}),
        ("inner", 3),
    ],
)
def test_values_of_another_type_are_reported_with_their_key(name, given):
    structurer = Structurer()
    structurer.build(Everything, {name: given}, "options")
    assert len(structurer.problems) == 1
    assert str(structurer.problems[0].where).startswith(f"options.{name}")


def test_a_rule_about_several_fields_is_reported():
    structurer = Structurer()
    assert structurer.build(Everything, {"low": 5, "high": 3}, "options") is INVALID
    assert [each.what for each in structurer.problems] == ["high must not be below low"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int | None, "integer | null"),
        (Literal["a", "b"], "a | b"),
        (list[int], "list[integer]"),
        (tuple[float, ...], "list[number]"),
        (dict[str, float], "mapping[text, number]"),
        (Colour, "red | blue"),
        (bool, "true | false"),
    ],
)
def test_types_in_words(kind, text):
    assert describe_type(kind) == text


@pytest.mark.parametrize("text", ["data: &a\n  generation: *a\n", "algorithm: &a {name: t, options: {x: [*a]}}\n"])
def test_a_value_that_contains_itself(tmp_path, text):
    with pytest.raises(ConfigError, match="contains itself"):
        load_recipe(write(tmp_path, text))


def test_an_override_that_contains_itself(tmp_path):
    problems = problems_of(tmp_path, MINIMAL, ("observers=&a [*a]",))
    assert "contains itself" in next(iter(problems.values())).what


def test_an_override_of_an_item_of_a_list(tmp_path):
    problems = problems_of(tmp_path, MINIMAL + "data: {sources: [a.jsonl]}\n", ("data.sources.0=b.jsonl",))
    problem = problems["--set data.sources.0=b.jsonl"]
    assert "is a list" in problem.what
    assert "data.sources=[" in problem.hint


def test_no_name_or_path_has_a_nul(tmp_path):
    problems = problems_of(tmp_path, 'verifier: "a\\0b"\nalgorithm: tinker\noutput: out\n')
    assert "character" in problems["r.yaml:1: verifier"].what
