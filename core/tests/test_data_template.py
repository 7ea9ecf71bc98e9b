"""The loss mask, with templates that differ where templates do: never a pattern, never everything."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.conversations import RowRejected, normalise
from draftsmith.data.template import (
    EncodedRow,
    check_template_arguments,
    encode,
    fold,
    load_tokenizer,
    render_prompt,
    template_variables,
)
from draftsmith.errors import ConfigError, DataError, VerifierError

pytestmark = pytest.mark.model

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Drops the thinking of earlier turns, opens an empty think block where thinking is off (as Qwen3 does).
THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
# Strips the thinking of every answer although the generation prompt opens it (as R1's distillations do).
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')\n' }}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GENERATION_AROUND_NOTHING = CHATML + "{% if never %}{% generation %}x{% endgeneration %}{% endif %}"
# The terminator is not eos, and the whole conversation ends in eos (as Phi-3's does).
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<file_sep>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<repo_name>' + m.role + '<reponame>\n' + m.content | trim + '<file_sep>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<repo_name>assistant<reponame>\n' }}{% endif %}"
)
# No special token anywhere.
ALPACA = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n[end]\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/…') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = """
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + ('#' + m.tool_call_id if m.tool_call_id else '') + '\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.name + (call.function.arguments | tojson) + '</call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
# The last turn of a tool call has a terminator of its own.
TWO_TERMINATORS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if m.tool_calls %}{{ '<call>' + m.tool_calls[0].function.name + '<file_sep>' }}"
    "{% else %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TWO_TURNS = [user("Hi"), assistant("Hello there."), user("2+2?"), assistant("It is 4.")]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path: Path) -> Any:
    return load_tokenizer(smollm2_path)


@pytest.fixture
def with_template(smollm2_tokenizer: Any) -> Any:
    def make(template: str) -> Any:
        tokenizer = copy.copy(smollm2_tokenizer)
        tokenizer.chat_template = template
        return tokenizer

    return make


def supervised(tokenizer: Any, row: EncodedRow) -> list[str]:
    """The text of each run of supervised tokens."""
    spans: list[list[int]] = []
    before = False
    for token, wanted in zip(row.token_ids, row.loss_mask, strict=True):
        if wanted and not before:
            spans.append([])
        if wanted:
            spans[-1].append(token)
        before = wanted
    return [tokenizer.decode(span) for span in spans]


def all_supervised(tokenizer: Any, encoding: Any) -> list[list[str]]:
    return [supervised(tokenizer, row) for row in encoding.rows]


# --- what is supervised -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "terminator"),
    [(CHATML, "<|im_end|>"), (PHI, "<file_sep>"), (LLAMA3, "<file_sep>"), (ALPACA, "\n[end]"), (TOOLS, "<|im_end|>")],
    ids=["chatml", "phi", "llama3", "alpaca", "tools"],
)
def test_answers_and_their_terminators_are_supervised_and_nothing_else(
    with_template: Any, template: str, terminator: str
) -> None:
    tokenizer = with_template(template)
    encoding = encode(tokenizer, TWO_TURNS)
    assert all_supervised(tokenizer, encoding) == [["Hello there." + terminator, "It is 4." + terminator]]
    assert encoding.terminators == {terminator.strip()}
    assert not encoding.rewrites_history


@settings(max_examples=60)
@given(
    template=st.sampled_from([CHATML, PHI, LLAMA3, GENERATION, THINKING]),
    texts=st.lists(st.text(st.sampled_from("ab 4.\n\té你<|"), min_size=1), min_size=2, max_size=6),
)
def test_any_conversation_is_supervised_exactly_where_the_verifier_would_write(
    smollm2_tokenizer: Any, template: str, texts: list[str]
) -> None:
    tokenizer = copy.copy(smollm2_tokenizer)
    tokenizer.chat_template = template
    texts = [text if text.strip() else "x" for text in texts]
    messages = [user(text) if n % 2 == 0 else assistant(text) for n, text in enumerate(texts)]
    asked = [n for n in range(len(texts) - 1) if n % 2 == 0]
    rows = encode(tokenizer, messages).rows
    prompts = [render_prompt(tokenizer, messages[: n + 1]) for n in asked]
    # Every serving prompt begins some row, and the token behind it is supervised.
    for prompt in prompts:
        found = [row for row in rows if row.token_ids[: len(prompt)] == prompt]
        assert found
        assert any(row.loss_mask[len(prompt)] for row in found)
    # What is supervised is what the template renders behind those prompts, and no more.
    written = "".join(span for row in rows for span in supervised(tokenizer, row))
    ends = "<file_sep>" if "file_sep" in template else "<|im_end|>"
    thinks = "<think>\n\n</think>\n\n" if template is THINKING else ""
    answers = [texts[n + 1].strip() if template is LLAMA3 else texts[n + 1] for n in asked]
    assert written == "".join(thinks + answer + ends for answer in answers)


def test_the_models_own_template(smollm2_tokenizer: Any) -> None:
    encoding = encode(smollm2_tokenizer, TWO_TURNS)
    assert all_supervised(smollm2_tokenizer, encoding) == [["Hello there.<|im_end|>", "It is 4.<|im_end|>"]]
    # The template's own system prompt stands there once, however many turns are rendered.
    assert smollm2_tokenizer.decode(encoding.rows[0].token_ids).count("<|im_start|>system") == 1


@pytest.mark.parametrize(
    "template", [CHATML, THINKING, PHI, LLAMA3, ALPACA, GENERATION], ids=["chatml", "think", "phi", "l3", "alp", "gen"]
)
def test_every_row_begins_with_the_serving_prompt_token_by_token(with_template: Any, template: str) -> None:
    tokenizer = with_template(template)
    rows = encode(tokenizer, TWO_TURNS).rows
    prompt = render_prompt(tokenizer, TWO_TURNS[:3])
    last = rows[-1]
    assert last.token_ids[: len(prompt)] == prompt
    assert last.loss_mask[len(prompt)]
    first_prompt = render_prompt(tokenizer, TWO_TURNS[:1])
    assert rows[0].token_ids[: len(first_prompt)] == first_prompt
    assert rows[0].loss_mask.index(True) == len(first_prompt)


def test_the_boundary_is_exact_where_a_token_would_reach_across_it(with_template: Any) -> None:
    # The generation prompt ends in a newline, the answer begins with one: tokenised together they are one token.
    tokenizer = with_template(ALPACA)
    prompt = render_prompt(tokenizer, [user("Hi")])
    (row,) = encode(tokenizer, [user("Hi"), assistant("\n\nHello")]).rows
    assert row.token_ids[: len(prompt)] == prompt
    assert row.loss_mask == [False] * len(prompt) + [True] * (len(row.token_ids) - len(prompt))
    assert supervised(tokenizer, row) == ["\n\nHello\n[end]"]


def test_an_answer_that_changes_the_prompts_own_tokens_makes_a_row_a_turn(with_template: Any) -> None:
    # This tokenizer reads two newlines as one token, and as two where a word follows: the history of the second turn
    # has other tokens than the prompt of the first had. Both rows are what serving sends.
    tokenizer = with_template(LLAMA3.replace("<reponame>\n", "<reponame>\n\n"))
    encoding = encode(tokenizer, TWO_TURNS)
    assert all_supervised(tokenizer, encoding) == [["Hello there.<file_sep>"], ["It is 4.<file_sep>"]]
    for row, asked in zip(encoding.rows, (1, 3), strict=True):
        prompt = render_prompt(tokenizer, TWO_TURNS[:asked])
        assert row.token_ids[: len(prompt)] == prompt


def test_thinking_is_supervised_and_earlier_thinking_makes_a_row_a_turn(with_template: Any) -> None:
    tokenizer = with_template(THINKING)
    conversation = [
        user("Hi"),
        assistant("Hello.", reasoning_content="greet"),
        user("2+2?"),
        assistant("4.", reasoning_content="add"),
    ]
    encoding = encode(tokenizer, conversation)
    assert encoding.rewrites_history
    assert all_supervised(tokenizer, encoding) == [
        ["<think>\ngreet\n</think>\n\nHello.<|im_end|>"],
        ["<think>\nadd\n</think>\n\n4.<|im_end|>"],
    ]
    assert "greet" not in tokenizer.decode(encoding.rows[1].token_ids)


def test_template_arguments_reach_prompt_and_row(with_template: Any) -> None:
    tokenizer = with_template(THINKING)
    arguments = {"enable_thinking": False}
    (row,) = encode(tokenizer, TWO_TURNS[:2], template_arguments=arguments).rows
    prompt = render_prompt(tokenizer, TWO_TURNS[:1], arguments)
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert row.token_ids[: len(prompt)] == prompt
    assert supervised(tokenizer, row) == ["Hello there.<|im_end|>"]
    (thinking,) = encode(tokenizer, TWO_TURNS[:2]).rows
    assert supervised(tokenizer, thinking) == ["<think>\n\n</think>\n\nHello there.<|im_end|>"]


def test_an_answer_that_would_not_follow_its_prompt_in_serving_is_rejected(with_template: Any) -> None:
    with pytest.raises(RowRejected, match="regenerate") as raised:
        encode(with_template(FORGETFUL), [user("Hi"), assistant("<think>\ngreet\n</think>Hello")])
    assert raised.value.reason == "answer_does_not_follow_prompt"


# --- {% generation %} -------------------------------------------------------------------------------------------


def test_generation_marks_narrow_what_follows_the_prompt(with_template: Any) -> None:
    tokenizer = with_template(GENERATION)
    plain = encode(tokenizer, TWO_TURNS)
    assert all_supervised(tokenizer, plain) == [["Hello there.<|im_end|>", "It is 4.<|im_end|>"]]
    assert plain.differing_marks == 0
    marked = encode(tokenizer, [user("Hi"), assistant("Hello.", reasoning_content="greet")])
    assert all_supervised(tokenizer, marked) == [["Hello.<|im_end|>"]]
    assert marked.differing_marks == 1


def test_marks_that_mark_nothing_leave_the_terminator_at_most(with_template: Any) -> None:
    tokenizer = with_template(GENERATION_AROUND_NOTHING)
    encoding = encode(tokenizer, TWO_TURNS)
    assert encoding.differing_marks == 2
    assert all("Hello" not in each for row in all_supervised(tokenizer, encoding) for each in row)


# --- conversations of every kind --------------------------------------------------------------------------------


def test_a_five_turn_tool_dialogue_survives(with_template: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    row = {
        "messages": [
            user("2+2?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
            assistant("It is 4."),
            user("Thanks"),
            assistant("Bye"),
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    messages, tools = normalise(row)
    tokenizer = with_template(TOOLS)
    encoding = encode(tokenizer, messages, tools)
    assert all_supervised(tokenizer, encoding) == [
        ['<call>add{"a": 2}</call><|im_end|>', "It is 4.<|im_end|>", "Bye<|im_end|>"]
    ]
    text = tokenizer.decode(encoding.rows[0].token_ids)
    assert '"name": "add"' in text
    assert "<|im_start|>tool#c1\n4<|im_end|>" in text


def test_a_tool_call_with_a_terminator_of_its_own(with_template: Any) -> None:
    tokenizer = with_template(TWO_TERMINATORS)
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    encoding = encode(tokenizer, [user("2+2?"), assistant("", tool_calls=[call])])
    assert all_supervised(tokenizer, encoding) == [["<call>add<file_sep>"]]


def test_an_opening_assistant_turn_is_context_and_counted(with_template: Any) -> None:
    tokenizer = with_template(CHATML)
    encoding = encode(tokenizer, [assistant("Welcome!"), *TWO_TURNS])
    assert encoding.leading_answers == 1
    assert all_supervised(tokenizer, encoding) == [["Hello there.<|im_end|>", "It is 4.<|im_end|>"]]


@pytest.mark.parametrize(
    "messages",
    [[assistant("Welcome!"), *TWO_TURNS], [user("Hi"), user("there"), assistant("Hello.")]],
    ids=["assistant first", "user twice"],
)
def test_a_template_that_raises_rejects_the_row_in_its_own_words(with_template: Any, messages: Any) -> None:
    with pytest.raises(RowRejected, match="roles must alternate") as raised:
        encode(with_template(ALTERNATING), messages)
    assert raised.value.reason == "template_error"


def test_messages_after_the_last_answer_are_left_out(with_template: Any) -> None:
    tokenizer = with_template(CHATML)
    assert encode(tokenizer, [*TWO_TURNS, user("And?")]).rows == encode(tokenizer, TWO_TURNS).rows


@pytest.mark.parametrize("messages", [[user("Hi")], [assistant("Welcome!")]])
def test_a_conversation_without_an_answer_is_rejected(with_template: Any, messages: Any) -> None:
    with pytest.raises(RowRejected) as raised:
        encode(with_template(CHATML), messages)
    assert raised.value.reason == "no_assistant_turn"


def test_an_empty_answer_is_rejected(with_template: Any) -> None:
    with pytest.raises(RowRejected) as raised:
        encode(with_template(CHATML), [user("Hi"), assistant("")])
    assert raised.value.reason == "empty_assistant_turn"


@pytest.mark.parametrize("template", [CHATML, PHI, ALPACA], ids=["chatml", "phi", "alpaca"])
def test_a_cut_answer_is_dropped_or_kept_without_its_terminator(with_template: Any, template: str) -> None:
    tokenizer = with_template(template)
    cut = [*TWO_TURNS[:3], assistant("It is", finish_reason="length")]
    dropped = encode(tokenizer, cut)
    assert dropped.rows == encode(tokenizer, TWO_TURNS[:2]).rows
    assert dropped.cut_turns == 1
    kept = encode(tokenizer, cut, keep_cut_answers=True)
    assert supervised(tokenizer, kept.rows[-1])[-1] == "It is"
    assert kept.rows[-1].token_ids[-1] == tokenizer(" is", add_special_tokens=False)["input_ids"][-1]
    with pytest.raises(RowRejected) as raised:
        encode(tokenizer, [user("Hi"), assistant("Hel", finish_reason="length")])
    assert raised.value.reason == "cut_answer"


def test_fold_merges_only_what_continues() -> None:
    first = EncodedRow(token_ids=[1, 2, 3], loss_mask=[False, True, True])
    longer = EncodedRow(token_ids=[1, 2, 3, 4, 5], loss_mask=[False, False, False, False, True])
    other = EncodedRow(token_ids=[1, 9, 3, 4, 5], loss_mask=[False, False, False, False, True])
    assert fold([first, longer]) == [EncodedRow(token_ids=[1, 2, 3, 4, 5], loss_mask=[False, True, True, False, True])]
    assert fold([first, other]) == [first, other]


# --- tokenizer and template -------------------------------------------------------------------------------------


def test_an_argument_that_the_template_never_reads_is_refused(with_template: Any) -> None:
    tokenizer = with_template(THINKING)
    check_template_arguments(tokenizer, {"enable_thinking": False})
    with pytest.raises(ConfigError) as raised:
        check_template_arguments(tokenizer, {"enable_thinkin": False, "tools": []})
    assert len(raised.value.problems) == 2
    assert "enable_thinking" in str(raised.value.problems[0].hint)


def test_variables_of_a_template_with_generation_blocks() -> None:
    assert template_variables(GENERATION + "{{ date_string }}") >= {"date_string"}
    with pytest.raises(VerifierError, match="cannot be parsed"):
        template_variables("{% for %}")


def test_a_prompt_that_the_template_refuses_is_an_error(with_template: Any) -> None:
    with pytest.raises(DataError, match="roles must alternate"):
        render_prompt(with_template(ALTERNATING), [user("Hi"), user("there")])


def tokenizer_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(source / name, target / name)
    return target


def test_a_verifier_without_a_chat_template_is_refused(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="no chat template") as raised:
        load_tokenizer(tokenizer_folder(smollm2_path, tmp_path / "base"))
    assert "chat_template.jinja" in str(raised.value.hint)


def test_a_vision_models_tokenizer_needs_no_processor(smollm2_path: Path, tmp_path: Path) -> None:
    folder = tokenizer_folder(smollm2_path, tmp_path / "vision")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    (folder / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    # Where older vision-language models keep their template.
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert load_tokenizer(folder).chat_template == "{{ messages[0].content }}"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_last_character_of_several_tokens_is_marked_whole(with_template: Any) -> None:
    tokenizer = with_template(GENERATION)
    encoding = encode(tokenizer, [user("4"), assistant("\u4f60")])  # three tokens, of which transformers marks one
    assert all_supervised(tokenizer, encoding) == [["\u4f60<|im_end|>"]]
    assert encoding.differing_marks == 0


def test_marks_that_mark_nothing_leave_nothing_to_learn(with_template: Any) -> None:
    tokenizer = with_template(CHATML + "{% generation %}{% endgeneration %}")
    encoding = encode(tokenizer, [user("4"), assistant("four")])
    assert all_supervised(tokenizer, encoding) == [[]]


def test_cut_answers_have_no_terminator(with_template: Any) -> None:
    tokenizer = with_template(CHATML)
    messages = [user("4"), {**assistant("four"), "finish_reason": "length"}]
    assert encode(tokenizer, messages, keep_cut_answers=True).terminators == frozenset()
