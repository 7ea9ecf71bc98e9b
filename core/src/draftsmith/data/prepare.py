"""The prepare stage: conversations → token ids, loss mask, split, vocabulary map.

Every row of the sources ends as a row of the output or in ``rejected.jsonl`` with its reason, or is counted as a
duplicate or as not drawn; the summary gives the counts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, define, field

from draftsmith.data.conversations import (
    Conversation,
    Rejection,
    RowRejected,
    count_rows,
    fingerprint_sources,
    read_conversations,
)
from draftsmith.data.template import (
    EncodedRow,
    check_template_arguments,
    encode,
    load_tokenizer,
    template_variables,
)
from draftsmith.errors import DataError, DiskSpaceError, OutputError
from draftsmith.stages import Stage, StageRecord

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from draftsmith.config.resolve import ResolvedRun
    from draftsmith.data.dataset import RowWriter
    from draftsmith.data.regenerate import Answered

__all__ = ["prepare_fingerprint", "run_prepare", "split_by_hash", "tokenizer_fingerprint"]

#: Raised when the meaning of the stored rows changes, so that older ones are not reused.
FORMAT = 2

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def run_prepare(run: ResolvedRun, console: Console | None = None, *, overwrite: bool = False) -> StageRecord:
    """Make the prepared data of *run*, or find it made.

    Raises:
        DataError: no source, an unreadable one, or nothing left to train on.
        VerifierError: the verifier has no tokenizer or no chat template.
        ConfigError: a template argument that the template does not take.
        FingerprintMismatch: the folder holds data made from other inputs.
    """
    # Rows are tokenised in this process; the tokenizer's threads would only be in the way of forks made later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stage = Stage("prepare", run.folders.prepared)
    record = stage.record()
    # An interrupted or failed preparation holds nothing that would be lost: mended data may take its place.
    unfinished = record is not None and not record.complete
    state = stage.begin(prepare_fingerprint(run), overwrite=overwrite or unfinished)
    if state == "complete":
        assert record is not None
        return record
    _clear(run.folders.prepared)
    finished = stage.finish(_Preparation(run, console).make())
    if console is not None:
        for line in _summary_lines(finished.summary, run.folders.prepared):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return finished


def prepare_fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """All that the prepared rows depend on. Needs neither torch nor transformers."""
    data = run.recipe.data
    if not data.sources:
        raise DataError(
            "there are no conversations to train on", where="data.sources", hint="name JSONL or Parquet files"
        )
    regenerated = data.responses == "regenerate"
    generation = {key: value for key, value in asdict(data.generation).items() if key != "batch_size"}
    generation |= {"engine": run.recipe.capture.engine, "dtype": run.recipe.capture.dtype}
    return {
        "format": FORMAT,
        "verifier": run.verifier.fingerprint,
        "tokenizer": tokenizer_fingerprint(run.verifier.path),
        "chat_template": _template_fingerprint(run.verifier.path),
        "template_arguments": dict(data.template_arguments),
        "sources": fingerprint_sources(data.sources, run.base),
        "max_length": data.max_length,
        "max_rows": data.max_rows,
        "validation_share": data.validation_share,
        "responses": data.responses,
        "keep_cut_answers": data.keep_cut_answers,
        "generation": generation if regenerated else None,
        "seed": data.seed,
        "draft_size": run.recipe.vocabulary.draft_size,
    }


def tokenizer_fingerprint(folder: Path) -> str:
    """32 hex digits over the tokenizer's files."""
    hasher = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        with contextlib.suppress(FileNotFoundError):
            content = (folder / name).read_bytes()
            hasher.update(f"{name}\0{len(content)}\0".encode())
            hasher.update(content)
    return hasher.hexdigest()[:32]


def _template_fingerprint(folder: Path) -> str:
    """32 hex digits over the chat template's text, wherever the model keeps it."""
    hasher = hashlib.sha256()
    for name in _TEMPLATE_FILES:
        with contextlib.suppress(OSError):
            hasher.update((folder / name).read_bytes())
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        hasher.update(path.name.encode() + path.read_bytes())
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        hasher.update(json.dumps(config.get("chat_template")).encode())
    return hasher.hexdigest()[:32]


def _summary_lines(summary: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """What was made, and what was left out and why."""
    for name in ("train", "validation"):
        yield (
            f"{name}: {summary[f'{name}_rows']:,} rows, {summary[f'{name}_tokens']:,} tokens,"
            f" {summary[f'{name}_supervised_tokens']:,} of them supervised"
        )
    yield (
        f"draft vocabulary: {summary['draft_vocabulary']:,} tokens, covering {summary['coverage']:.2%} of the"
        f" supervised tokens in training and {summary['validation_coverage']:.2%} in validation"
    )
    rejected: Mapping[str, int] = summary["rejected"]
    if rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
        yield f"rejected: {sum(rejected.values()):,} rows ({reasons}); see {folder / 'rejected.jsonl'}"
    counted = {
        "duplicates": "duplicates left out",
        "not_drawn": "not drawn (data.max_rows)",
        "truncated": "cut at the longest row (data.max_length)",
        "cut_answers": "answers that had been cut at a length limit",
        "opening_answers": "opening assistant turns taken as context",
        "differing_generation_marks": "turns of which the template marks only a part as generated",
    }
    parts = [f"{summary[key]:,} {text}" for key, text in counted.items() if summary[key]]
    if parts:
        yield f"also: {'; '.join(parts)}"
    if summary["conversations_in_several_rows"]:
        yield (
            f"{summary['conversations_in_several_rows']:,} conversations became a row a turn: rendered with later"
            " turns, earlier ones do not keep the tokens that they were served with"
        )
    yield from (f"note: {note}" for note in summary["notes"])


def _clear(folder: Path) -> None:
    """Remove what an interrupted preparation left. Answers are kept elsewhere, and survive."""
    for entry in folder.iterdir():
        if entry.name == "stage.json":
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


# --- the work ---------------------------------------------------------------------------------------------------


@define
class _Counts:
    read: int = 0
    not_drawn: int = 0
    rejected: Counter[str] = field(factory=Counter)
    sources: Counter[str] = field(factory=Counter)
    duplicates: int = 0
    truncated: int = 0
    cut_answers: int = 0
    conversations: int = 0
    opening_answers: int = 0
    split_conversations: int = 0
    differing_marks: int = 0
    answers: int = 0
    terminators: Counter[str] = field(factory=Counter)


class _Preparation:
    """One preparation: reads, encodes, writes, counts."""

    def __init__(self, run: ResolvedRun, console: Console | None) -> None:
        from draftsmith.data.dataset import REJECTED, RowWriter

        self.run = run
        self.console = console
        self.data = run.recipe.data
        self.folder = run.folders.prepared
        self.tokenizer = load_tokenizer(run.verifier.path, trust_remote_code=run.recipe.trust_remote_code)
        check_template_arguments(self.tokenizer, self.data.template_arguments)
        self.counts = _Counts()
        self.seen: set[str] = set()
        self.groups: list[str] = []
        self.lengths: list[int] = []
        self.longest_answer = 0
        self.frequencies: list[Tensor] = []
        self.occurring: set[int] = set()
        self.writer: RowWriter = RowWriter(self.folder)
        # What is no Unicode stays readable as JSON: a lone surrogate is written as its escape.
        self.rejected = open(  # noqa: SIM115 - closed in make()
            self.folder / REJECTED, "w", encoding="utf-8", errors="backslashreplace"
        )

    def make(self) -> dict[str, Any]:
        """Do it; returns the stage's summary."""
        try:
            with self.rejected:
                if self.data.responses == "regenerate":
                    self._regenerate(self._drawn(allow_empty_answers=True))
                else:
                    for conversation in self._drawn():
                        self._encode(conversation)
            self._stop_without_rows()
            return self._finish()
        except OSError as error:
            kind = DiskSpaceError if error.errno == errno.ENOSPC else OutputError
            raise kind(
                f"the prepared rows cannot be made: {error}",
                where=str(self.folder),
                hint="make room on the disk, or choose another output folder",
            ) from error

    # --- reading ------------------------------------------------------------------------------------------------

    def _drawn(self, *, allow_empty_answers: bool = False) -> Iterator[Conversation]:
        """The conversations to use; rejected rows are written down on the way."""
        conversations = self._usable(
            self._watched(
                read_conversations(self.data.sources, self.run.base, allow_empty_answers=allow_empty_answers)
            )
        )
        if self.data.max_rows is None:
            return conversations
        chosen = _draw(conversations, self.data.max_rows, self.data.seed)
        self.counts.not_drawn = self.counts.read - sum(self.counts.rejected.values()) - len(chosen)
        return iter(chosen)

    def _watched(self, rows: Iterable[Conversation | Rejection]) -> Iterator[Conversation | Rejection]:
        from draftsmith.progress import stage_progress

        total = count_rows(self.data.sources, self.run.base)
        with stage_progress(self.console, "reading conversations", max(1, total), "rows") as bar:
            for row in rows:
                self.counts.read += 1
                yield row
                bar.advance(1)

    def _usable(self, rows: Iterable[Conversation | Rejection]) -> Iterator[Conversation]:
        for row in rows:
            if isinstance(row, Rejection):
                self._reject(row)
            else:
                yield row

    def _reject(self, rejection: Rejection) -> None:
        self.counts.rejected[rejection.reason] += 1
        line = {
            "source": rejection.source,
            "line": rejection.line,
            "reason": rejection.reason,
            "detail": rejection.detail,
            "row": rejection.row,
        }
        try:
            text = json.dumps(line, ensure_ascii=False, default=str)
        except RecursionError:
            text = json.dumps({**line, "row": None}, ensure_ascii=False)
        self.rejected.write(text + "\n")

    # --- encoding -----------------------------------------------------------------------------------------------

    def _encode(self, conversation: Conversation) -> None:
        try:
            encoding = encode(
                self.tokenizer,
                conversation.messages,
                conversation.tools,
                self.data.template_arguments,
                keep_cut_answers=self.data.keep_cut_answers,
            )
        except RowRejected as error:
            self.counts.cut_answers += error.reason == "cut_answer"
            self._reject(_rejection(conversation, error))
            return
        counts = self.counts
        counts.cut_answers += encoding.cut_turns
        counts.opening_answers += encoding.leading_answers
        counts.differing_marks += encoding.differing_marks
        counts.split_conversations += encoding.rewrites_history
        counts.terminators.update(encoding.terminators)
        self._keep(conversation, encoding.rows)

    def _regenerate(self, conversations: Iterable[Conversation]) -> None:
        from draftsmith.data.generators import Generator, Sampling, open_generator
        from draftsmith.data.regenerate import AnswerStore, RegenerationPlan, regenerate
        from draftsmith.progress import stage_progress

        run, generation = self.run, self.data.generation
        plan = RegenerationPlan(
            verifier=run.verifier.fingerprint,
            sampling=Sampling(temperature=generation.temperature, top_p=generation.top_p, top_k=generation.top_k),
            max_tokens=generation.max_tokens,
            max_length=self.data.max_length,
            engine=run.recipe.capture.engine,
            dtype=run.recipe.capture.dtype,
            seed=generation.seed,
            keep_cut_answers=self.data.keep_cut_answers,
        )

        def open_engine() -> Generator:
            return open_generator(
                plan.engine,
                run.verifier,
                self.tokenizer,
                plan.sampling,
                batch_size=generation.batch_size,
                max_length=self.data.max_length,
                dtype=plan.dtype,
                trust_remote_code=run.recipe.trust_remote_code,
                log=run.folders.answers / "engine.log",
            )

        # Read to the end first: the answers are written in rounds over all conversations.
        waiting = list(conversations)
        with (
            AnswerStore(run.folders.answers / "answers.jsonl") as store,
            stage_progress(self.console, "the verifier writes answers", max(1, len(waiting)), "conversations") as bar,
        ):
            shown = 0.0

            def on_answer(done: int, total: int) -> None:
                nonlocal shown
                reached = len(waiting) * done / max(1, total)
                bar.advance(max(0, int(reached) - int(shown)), answers=f"{done} of {total}")
                shown = max(shown, reached)

            for outcome in regenerate(
                waiting,
                self.tokenizer,
                self.data.template_arguments,
                plan,
                store,
                open_engine,
                on_answer=on_answer,
            ):
                if isinstance(outcome, Rejection):
                    self.counts.cut_answers += outcome.reason == "cut_answer"
                    self._reject(outcome)
                else:
                    self._keep_answered(outcome)

    def _keep_answered(self, answered: Answered) -> None:
        self.counts.answers += answered.answers
        self.counts.cut_answers += answered.cut_turns
        self.counts.split_conversations += len(answered.rows) > 1
        self._keep(answered.conversation, answered.rows)

    # --- writing ------------------------------------------------------------------------------------------------

    def _keep(self, conversation: Conversation, rows: Iterable[EncodedRow]) -> None:
        kept = False
        for row in rows:
            try:
                kept = self._keep_row(conversation, row) or kept
            except RowRejected as error:
                self._reject(_rejection(conversation, error))
        self.counts.conversations += kept

    def _keep_row(self, conversation: Conversation, row: EncodedRow) -> bool:
        """Write one row, cut at the tail where it is too long; False for a duplicate."""
        import torch

        from draftsmith.data.dataset import sample_id

        limit = self.data.max_length
        token_ids, loss_mask = row.token_ids[:limit], row.loss_mask[:limit]
        if not any(loss_mask):
            if any(row.loss_mask):
                raise RowRejected(
                    "too_long", f"no supervised token within the first {limit} of its {len(row.token_ids)} tokens"
                )
            raise RowRejected("nothing_supervised", "the template marks nothing of its answers as generated")
        if max(token_ids) >= self.run.verifier.vocab_size:
            raise DataError(
                f"the tokenizer gives token id {max(token_ids)}, the verifier has {self.run.verifier.vocab_size}",
                where=str(self.run.verifier.path),
                hint="the folder's tokenizer belongs to another model",
            )
        identity = sample_id(token_ids, loss_mask)
        if identity in self.seen:
            self.counts.duplicates += 1
            return False
        self.seen.add(identity)
        self.counts.truncated += len(row.token_ids) > limit
        self.counts.sources[conversation.source] += 1
        self.groups.append(conversation.prompt_hash)
        self.lengths.append(len(token_ids))
        self.longest_answer = max(self.longest_answer, _longest_run(loss_mask))
        self.occurring.update(token_ids)
        # Only what is supervised is kept in memory, for the vocabulary: some 2 bytes a token.
        ids = torch.tensor(token_ids, dtype=torch.int32)
        self.frequencies.append(ids[torch.tensor(loss_mask)])
        self.writer.add(identity, token_ids, loss_mask, conversation.source)
        return True

    def _stop_without_rows(self) -> None:
        if self.lengths:
            return
        self.writer.close()
        counts = self.counts
        shown = ", ".join(f"{reason}: {count}" for reason, count in counts.rejected.most_common(5))
        raise DataError(
            f"no supervised token is left of {counts.read} rows, so there is nothing to train on"
            + (f" (rejected: {shown})" if shown else ""),
            where=", ".join(self.data.sources),
            hint=f"{self.folder / 'rejected.jsonl'} says of each row what is wrong with it",
        )

    def _finish(self) -> dict[str, Any]:
        import torch

        from draftsmith.data.dataset import VOCABULARY
        from draftsmith.data.vocabulary import build_vocabulary, coverage, save_vocabulary

        validation = split_by_hash(self.groups, self.data.validation_share)
        frequencies = [self._count(each is wanted for each in validation) for wanted in (False, True)]
        vocabulary = build_vocabulary(frequencies[0], self.run.recipe.vocabulary.draft_size)
        occurs = torch.zeros(vocabulary.target_size, dtype=torch.bool)
        occurs[sorted(self.occurring)] = True
        save_vocabulary(self.folder / VOCABULARY, vocabulary, frequencies[0], occurs)
        self.writer.split(validation)
        counts = self.counts
        return {
            "read": counts.read,
            "conversations": counts.conversations,
            "rows": len(self.lengths),
            **self._split_summary("train", validation, False, frequencies[0]),
            **self._split_summary("validation", validation, True, frequencies[1]),
            "longest": max(self.lengths),
            "longest_answer": self.longest_answer,
            "mean_length": round(sum(self.lengths) / len(self.lengths), 1),
            "rejected": dict(counts.rejected.most_common()),
            "duplicates": counts.duplicates,
            "not_drawn": counts.not_drawn,
            "truncated": counts.truncated,
            "cut_answers": counts.cut_answers,
            "opening_answers": counts.opening_answers,
            "conversations_in_several_rows": counts.split_conversations,
            "differing_generation_marks": counts.differing_marks,
            "answers_written": counts.answers,
            "terminators": dict(counts.terminators.most_common(5)),
            "rows_by_source": dict(counts.sources),
            "draft_vocabulary": vocabulary.draft_size,
            "distinct_supervised_tokens": int((frequencies[0] > 0).sum()),
            "coverage": round(coverage(vocabulary, frequencies[0]), 6),
            "validation_coverage": round(coverage(vocabulary, frequencies[1]), 6),
            "notes": self._notes(),
        }

    def _count(self, wanted: Iterable[bool]) -> Tensor:
        """int64 [V_t]: supervised occurrences of each token in the wanted rows."""
        import torch

        chosen = [ids for ids, each in zip(self.frequencies, wanted, strict=True) if each]
        if not chosen:
            return torch.zeros(self.run.verifier.vocab_size, dtype=torch.int64)
        return torch.bincount(torch.cat(chosen), minlength=self.run.verifier.vocab_size)

    def _split_summary(self, name: str, validation: list[bool], wanted: bool, frequencies: Tensor) -> dict[str, int]:
        lengths = [length for length, each in zip(self.lengths, validation, strict=True) if each is wanted]
        return {
            f"{name}_rows": len(lengths),
            f"{name}_tokens": sum(lengths),
            f"{name}_supervised_tokens": int(frequencies.sum()),
        }

    def _notes(self) -> list[str]:
        notes = []
        template = self.tokenizer.chat_template
        texts = list(template.values()) if isinstance(template, dict) else [template]
        if any("strftime_now" in template_variables(text) for text in texts):
            notes.append("the chat template writes the current date into prompts: rows differ from day to day")
        if "" in self.counts.terminators:
            notes.append("the chat template puts no end of turn behind an answer: the draft does not learn to end one")
        return notes


def _longest_run(loss_mask: Iterable[bool]) -> int:
    """The most supervised tokens that follow one another."""
    return max((sum(1 for _ in run) for supervised, run in itertools.groupby(loss_mask) if supervised), default=0)


def _rejection(conversation: Conversation, error: RowRejected) -> Rejection:
    return Rejection(
        source=conversation.source,
        line=conversation.line,
        reason=error.reason,
        detail=error.detail,
        row=conversation.raw,
    )


def _draw(conversations: Iterable[Conversation], count: int, seed: int) -> list[Conversation]:
    """*count* conversations, each with the same chance wherever it stands, in their original order.

    Drawn by a hash of the content: the same conversation is drawn again from a longer or reordered source.
    """
    heap: list[tuple[int, int, Conversation]] = []
    for number, conversation in enumerate(conversations):
        text = f"{seed}/{conversation.content_hash}"
        rank = -int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        if len(heap) < count:
            heapq.heappush(heap, (rank, number, conversation))
        elif rank > heap[0][0]:
            heapq.heapreplace(heap, (rank, number, conversation))
    return [conversation for _, _, conversation in sorted(heap, key=lambda each: each[1])]


def split_by_hash(groups: list[str], share: float) -> list[bool]:
    """True for the rows of validation: those whose group's hash lies in the lowest *share* of all hashes.

    Rows of one group (conversations of one prompt) stay on one side, so that validation prompts are prompts not
    trained on, and adding data moves no row to the other side. With two groups or more neither side is left empty.
    """
    ranks = {group: int(hashlib.sha256(group.encode()).hexdigest()[:13], 16) / 16**13 for group in set(groups)}
    if share <= 0:
        return [False] * len(groups)
    chosen = {group for group, rank in ranks.items() if rank < share}
    if len(ranks) > 1:
        ordered = sorted(ranks, key=lambda group: (ranks[group], group))
        chosen = (chosen | {ordered[0]}) - ({ordered[-1]} if len(chosen) == len(ranks) else set())
    elif chosen:
        chosen = set()
    return [group in chosen for group in groups]
