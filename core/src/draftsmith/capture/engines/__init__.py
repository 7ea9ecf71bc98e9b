"""What produces hidden states. An engine runs the verifier over token rows and puts the states into a transport."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from attrs import field, frozen

from draftsmith.api import VerifierFacts
from draftsmith.capture.plan import has_linear_layers
from draftsmith.errors import ServingError
from draftsmith.interfaces import StateLayout
from draftsmith.serving.vllm_models import hands_out_hidden_states

__all__ = [
    "CaptureEngine",
    "CaptureSetup",
    "Done",
    "Request",
    "batches_by_length",
    "choose_engine",
    "verifier_problem",
    "vllm_problem",
    "vllm_unsuited",
]


@frozen
class Request:
    """One row to capture: its id and its token ids."""

    sample_id: str
    token_ids: Sequence[int]


@frozen(kw_only=True)
class Done:
    """What became of some requests.

    Attributes:
        stored: ids whose states are in the transport.
        refused: id → why its states are not (values that are not finite).
        tokens: token count of all of them.
        seconds: time that the verifier (and storing) took for them.
    """

    stored: tuple[str, ...]
    refused: Mapping[str, str] = field(factory=dict)
    tokens: int
    seconds: float


@frozen(kw_only=True)
class CaptureSetup:
    """What every engine is built from.

    Attributes:
        layout: layer ids, width and stored dtype.
        dtype: ``auto`` or torch's name of the verifier's compute dtype.
        batch_tokens: tokens per forward pass, about.
        longest: the longest row that will come.
        work_folder: for logs and messages between processes.
        trust_remote_code: run model code that comes with the verifier.
    """

    verifier: VerifierFacts
    layout: StateLayout
    dtype: str
    batch_tokens: int
    longest: int
    work_folder: Path
    trust_remote_code: bool = False


class CaptureEngine(ABC):
    """Loads the verifier when it is entered as a context; :meth:`capture` may then be called many times."""

    @property
    @abstractmethod
    def compute_dtype(self) -> str:
        """torch's name of the dtype that the verifier computes in."""

    @abstractmethod
    def __enter__(self) -> CaptureEngine: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def capture(self, requests: Iterable[Request]) -> Iterator[Done]:
        """Capture *requests* and put their states into the transport; yields as parts of them are safely there.

        Raises:
            TransportError, DiskSpaceError: a state cannot be stored. What was yielded before is stored.
            ServingError, VerifierError: the verifier cannot be run.
        """


def batches_by_length(requests: Iterable[Request], batch_tokens: int) -> list[list[Request]]:
    """Batches of similar length, longest first, so that padding is small and memory runs out at once or never.

    A batch of B rows, the longest of T tokens, has B * T <= *batch_tokens* (or one row).
    """
    batches: list[list[Request]] = []
    for request in sorted(requests, key=lambda each: (-len(each.token_ids), each.sample_id)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].token_ids) <= batch_tokens:
            batches[-1].append(request)
        else:
            batches.append([request])
    return batches


def vllm_problem() -> str | None:
    """Why the installed vLLM cannot capture hidden states, or None. Does not import it."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return "vLLM is not installed"
    for folder in found.submodule_search_locations:
        if (Path(folder) / "model_executor" / "models" / "extract_hidden_states.py").is_file():
            return None
    return "the installed vLLM is too old: it has no method to extract hidden states"


def verifier_problem(verifier: VerifierFacts) -> str | None:
    """Why the installed vLLM cannot capture this *verifier*, or None. Imports neither."""
    if hands_out_hidden_states(verifier.architectures) is False:
        return f"the installed vLLM does not hand out the hidden states of {verifier.architectures[0]}"
    return None


def vllm_unsuited(verifier: VerifierFacts | None = None) -> tuple[str, str] | None:
    """Why the installed vLLM cannot capture (this *verifier*, where one is given), and what to do; None: it can."""
    problem = vllm_problem()
    if problem is not None:
        return problem, "install vLLM"
    if verifier is None:
        return None
    problem = verifier_problem(verifier)
    if problem is not None:
        return problem, "install a version of vLLM whose class of that name does"
    if has_linear_layers(verifier):
        return (
            "vLLM's hidden states of models with layers of linear attention are not proved to be the model's",
            "capture where transformers can",
        )
    return None


def choose_engine(name: str, verifier: VerifierFacts | None = None) -> str:
    """``vllm`` or ``transformers``; ``auto`` is vllm where it can be used, for this *verifier* where one is given.

    Raises:
        ServingError: vllm is asked for and cannot be used.
    """
    unsuited = vllm_unsuited(verifier)
    if name == "auto":
        return "transformers" if unsuited else "vllm"
    if name == "vllm" and unsuited:
        problem, remedy = unsuited
        raise ServingError(problem, where="capture.engine", hint=f"use engine: transformers, or {remedy}")
    return name
