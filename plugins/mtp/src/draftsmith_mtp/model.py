"""The network: the verifier's own head, used again and again, with the verifier's embedding and head in place.

(embedding of x_{t+1}, hidden state of x_t) → two norms → a projection of both side by side → one decoder layer → a
norm → the verifier's head. Order, norms and the hidden states fed are the family's (families.py); its decoder layer is
a :class:`HeadLayer`. :meth:`MtpDraft.forward` is FastMTP's recursion (arXiv 2509.18362): the chains of all rows of a
packed row, step by step, with shared weights.

Shapes: R rows, n chains alive, H width, h query heads, g key heads, d head dimension, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pkgutil import resolve_name
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.api import VerifierFacts
from draftsmith.errors import CheckpointError, PluginError
from draftsmith.interfaces import AlgorithmSetup, DraftArchitecture
from draftsmith.layers import Weight, draft_head
from draftsmith.verifier import tensor_specs
from draftsmith.verifier_weights import read_verifier_tensors
from draftsmith_mtp.batch import Batch
from draftsmith_mtp.families import MtpFamily, family_of
from draftsmith_mtp.head import head_tensors
from draftsmith_mtp.mask import Attend

__all__ = ["AttendRows", "HeadLayer", "LayerPass", "MtpDraft", "MtpHead", "chosen_rows", "fit_tensors"]


#: (queries [n, h, d], keys and values [N, g, d] of the rows that came in, which of those the queries are of or None:
#: all) → [n, h, d]. *Who sees whom* is the recursion's business. Scores are scaled by 1/sqrt(d).
AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class LayerPass(ABC):
    """A decoder layer during one forward pass."""

    @abstractmethod
    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor | None, attend: AttendRows) -> Tensor:
        """Rows [N, H] at int64 *positions* [N] through the layer.

        Args:
            wanted: places of the rows that go out; None: all. Of the others nothing but keys and values is needed.

        Returns:
            [n, H].
        """


class HeadLayer(nn.Module, ABC):
    """The decoder layer of a family's head. Its parameters have the names that they have in the model's files."""

    @abstractmethod
    def prepare(self, dtype: torch.dtype) -> LayerPass:
        """For one forward pass in the compute dtype *dtype*; gradients reach the parameters."""


class MtpHead(nn.Module):
    """Skeleton and decoder layer, under own names (families.py). Families derive from it.

    Attributes:
        adds_one: the family's norms scale by 1 + weight.
        slow_layer: ``module:Class`` of the decoder layer's serving path, a ``draftsmith_mtp.replay.SlowLayer``.
    """

    adds_one: ClassVar[bool] = False
    slow_layer: ClassVar[str]

    def __init__(self, verifier: VerifierFacts, layer: HeadLayer, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        width = verifier.hidden_size
        self.eps = verifier.rms_norm_eps
        self.token_layernorm = norm()
        self.hidden_layernorm = norm()
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = layer
        self.final_layernorm = norm()

    def stored(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Own name → tensor, as the model's files hold them; *names* are those that they hold."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}

    def load_stored(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`stored`.

        Raises:
            CheckpointError: the tensors are not those of this network.
        """
        fit_tensors(self.state_dict(), tensors)


def fit_tensors(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy *tensors* into the parameters of the same names.

    Raises:
        CheckpointError: names or shapes differ.
    """
    unknown, missing = sorted(set(tensors) - set(state)), sorted(set(state) - set(tensors))
    if unknown or missing:
        found = [
            f"{len(each)} {kind}, such as {each[0]}"
            for kind, each in (("unknown", unknown), ("missing", missing))
            if each
        ]
        raise CheckpointError(
            f"the head's tensors are others than its configuration makes: {'; '.join(found)}",
            hint="do configuration and weights belong to one model?",
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"the head's {name} has shape {list(tensor.shape)}, the configuration makes it "
                    f"{list(state[name].shape)}",
                    hint="do configuration and weights belong to one model?",
                )
            state[name].copy_(tensor)


class MtpDraft(nn.Module, DraftArchitecture):
    """The draft: the verifier's native head, read from its files, with embedding and head shared and frozen.

    Nothing else of the verifier is read.

    Raises:
        VerifierError: the verifier is of no known family, or a tensor cannot be read.
        CheckpointError: its head's tensors are not those of the family's network.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__()
        verifier = setup.verifier
        self.family: MtpFamily = family_of(verifier.text_config)
        self.compute_dtype = setup.compute_dtype
        self.embed_tokens = Weight(setup.weights.embed_tokens.detach())
        self.lm_head = Weight(draft_head(setup.weights, setup.vocabulary, setup.compute_dtype))
        self.head = _network(self.family)(verifier)
        specs = head_tensors(self.family, verifier.text_config, tensor_specs(verifier.path))
        self.load_head(read_verifier_tensors(verifier, specs), verifier.text_config)

    def load_head(self, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
        """Put tensors under the model's names into the head.

        Raises:
            CheckpointError: they are not those of the network.
        """
        own = {self.family.own_name(name, config): tensor for name, tensor in tensors.items()}
        if None in own:
            raise CheckpointError(
                f"tensor {next(name for name in tensors if self.family.own_name(name, config) is None)} is none of a "
                f"head of the family {self.family.name}"
            )
        self.head.load_stored({str(name): tensor for name, tensor in own.items()})

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """The verifier's embedding and head."""
        return {"embed_tokens.weight": self.embed_tokens.weight, "lm_head.weight": self.lm_head.weight}

    def forward(self, batch: Batch, attend: Attend, *, continue_all: bool = False) -> list[Tensor]:
        """Normed hidden states [n_k, H] of the chains alive at each step that has any; times the head they are logits.

        Args:
            continue_all: every row goes through every step, since others may see what it made of it.
        """
        if not batch.steps[0].rows.numel():  # no chain: nothing to predict, still a function of the weights
            empty: Tensor = self.head.final_layernorm(batch.hidden[:0].to(self.compute_dtype))
            return [empty]
        run = _ForwardPass(self, batch, attend)
        hidden = batch.hidden.to(self.compute_dtype)
        outputs: list[Tensor] = []
        for step, alive in enumerate(batch.steps):
            if not alive.rows.numel():
                break
            if continue_all:
                raw = run.step(step, hidden, None, None)
                normed = self.head.final_layernorm(raw)
                outputs.append(chosen_rows(normed, alive.rows))
            else:
                rows = alive.rows if step else None
                raw = run.step(step, chosen_rows(hidden, alive.kept) if step else hidden, rows, alive.rows)
                normed = self.head.final_layernorm(raw)
                outputs.append(normed)
            # From here on the verifier's hidden states do not exist yet: the head's own stand in, at the row.
            hidden = raw if self.family.recycles == "raw" else normed
        return outputs


def _network(family: MtpFamily) -> Callable[[VerifierFacts], MtpHead]:
    if family.network is None:
        raise PluginError(f"heads of the family {family.name} cannot be trained yet: it names no network")
    found: Callable[[VerifierFacts], MtpHead] = resolve_name(family.network)
    return found


def chosen_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]. The backward of index_select adds whole rows; that of indexing adds elements, serially on CPUs."""
    return x.index_select(0, rows)


class _ForwardPass:
    """One packed row's run through the head: prepared weights, and the keys and values of all steps so far."""

    def __init__(self, model: MtpDraft, batch: Batch, attend: Attend) -> None:
        self.batch = batch
        self.attend = attend
        self.head = model.head
        self.layer = model.head.layer.prepare(model.compute_dtype)
        # The projection of two vectors side by side is the sum of two: one a token, one a row and step.
        first, second = model.head.input_proj.weight.to(model.compute_dtype).chunk(2, dim=1)
        embedding_first = model.family.concatenation == "embedding_hidden"
        of_embedding, self.of_hidden = (first, second) if embedding_first else (second, first)
        embedded = F.embedding(batch.token_ids, model.embed_tokens.weight).to(model.compute_dtype)
        self.share = F.linear(model.head.token_layernorm(embedded), of_embedding)  # [R, H]
        self.zeroes_first = model.family.zeroes_first
        self.cache: list[tuple[Tensor, Tensor]] = []

    def step(self, step: int, hidden: Tensor, rows: Tensor | None, wanted: Tensor | None) -> Tensor:
        """One step of the recursion.

        Args:
            hidden: [n, H], of the rows *rows*.
            rows: which rows come in; None: all.
            wanted: which rows go out: *rows*, or a part of all; None: all.

        Returns:
            [n, H] of the rows that go out, before the final norm.
        """
        mixed = self._embedding_share(step, rows) + F.linear(self.head.hidden_layernorm(hidden), self.of_hidden)
        positions = self.batch.positions + step
        if rows is not None:
            positions = positions[rows]

        def attend(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor | None) -> Tensor:
            self.cache.append((self._spread(key, rows), self._spread(value, rows)))
            of_query = rows if chosen is None else chosen  # rows come in whole wherever a part of them is chosen
            attended = self.attend(self._spread(query, of_query), self.cache, self.batch.document_lengths)
            return attended if of_query is None else chosen_rows(attended, of_query)

        # At step 0 every row leaves keys and values; the rest is needed for the chains alone.
        return self.layer(mixed, positions, wanted if rows is None else None, attend)

    def _embedding_share(self, step: int, rows: Tensor | None) -> Tensor:
        """The projection's part that the token alone decides, [n, H]."""
        if step == 0:
            if not self.zeroes_first:
                return self.share
            # vLLM puts zeros in place of the embedding at position 0, and neither norm nor projection adds anything.
            return self.share.masked_fill((self.batch.positions == 0)[:, None], 0.0)
        # Row t reads x_{t+1+k} at step k: the token of row t + k, which is in its document wherever a chain is alive.
        total = self.share.shape[0]
        tokens = torch.arange(step, total + step, device=self.share.device) if rows is None else rows + step
        return chosen_rows(self.share, tokens.clamp(max=total - 1))

    def _spread(self, chosen: Tensor, rows: Tensor | None) -> Tensor:
        """[n, …] of some rows → [R, …], zero elsewhere; nobody reads a row whose chain has ended."""
        total = self.batch.token_ids.shape[0]
        if rows is None or chosen.shape[0] == total:
            return chosen
        return chosen.new_zeros(total, *chosen.shape[1:]).index_copy(0, rows, chosen)
