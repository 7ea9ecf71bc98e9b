"""The conformance suite of hidden-state transports.

Subclass :class:`TransportTests` in a test module and override one fixture::

    class TestMine(TransportTests):
        @pytest.fixture
        def transport(self, tmp_path):
            return MyTransport(MyOptions(), tmp_path / "run")

Everything else is checked by what a transport promises to the core: bit-exact samples of every dtype, nothing
partial ever visible, idempotent ``put`` and ``delete``, runs that do not see each other, readers that travel into
worker processes, and errors that say which sample is missing or does not fit.

A transport that keeps states in eight bits (:mod:`draftsmith.fp8`) subclasses :class:`Fp8TransportTests`: the same
suite, in which what comes back is what that coding leaves, to the bit.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch

from draftsmith import fp8
from draftsmith.errors import FingerprintMismatch, SampleCorrupt, SampleMissing, TransportError
from draftsmith.interfaces import HiddenStateReader, HiddenStateSample, HiddenStateTransport, StateLayout

__all__ = ["Fp8TransportTests", "TransportTests", "make_layout", "make_sample"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def make_layout(
    dtype: str = "bfloat16", *, ids: int = 4, hidden_size: int = 24, fingerprint: str = "f" * 32
) -> StateLayout:
    """A small layout."""
    return StateLayout(fingerprint=fingerprint, layer_ids=tuple(range(ids)), hidden_size=hidden_size, dtype=dtype)


def make_sample(number: int, layout: StateLayout, tokens: int | None = None) -> HiddenStateSample:
    """Sample *number*: its id, length and every bit of its states follow from the number."""
    generator = torch.Generator().manual_seed(number)
    length = tokens if tokens is not None else 1 + number * 7 % 50
    shape = (length, len(layout.layer_ids), layout.hidden_size)
    states = torch.randn(shape, generator=generator).mul(10.0 ** (number % 7 - 3))
    return HiddenStateSample(
        sample_id=f"{number:032x}",
        token_ids=torch.randint(0, 2**40, (length,), generator=generator),
        hidden_states=states.to(_DTYPES[layout.dtype]),
    )


def assert_same(got: HiddenStateSample, expected: HiddenStateSample) -> None:
    """Equal to the bit (so that -0.0 and 0.0 differ), in ids, lengths, dtypes and shapes."""
    assert got.sample_id == expected.sample_id
    assert got.token_ids.dtype == torch.int64
    assert torch.equal(got.token_ids, expected.token_ids)
    assert got.hidden_states.dtype == expected.hidden_states.dtype
    assert got.hidden_states.shape == expected.hidden_states.shape
    bits = _BITS[expected.hidden_states.dtype]
    assert torch.equal(got.hidden_states.contiguous().view(bits), expected.hidden_states.contiguous().view(bits))


def _check_in_worker(reader: HiddenStateReader, expected: list[HiddenStateSample]) -> int:
    for sample in expected:
        assert_same(reader.get(sample.sample_id), sample)
    return os.getpid()


_ENDLESS_WRITER = """
import pickle, sys
from draftsmith.testing.transport import make_sample
transport, layout = pickle.load(sys.stdin.buffer)
with transport.writer(layout) as writer:
    number = 0
    while True:
        writer.put(make_sample(number, layout, tokens=20_000))
        print(number, flush=True)
        number += 1
"""


class TransportTests:
    """What every transport must promise. Override the fixture ``transport``."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> HiddenStateTransport:
        raise NotImplementedError("override this fixture with your transport, on a location of its own")

    @staticmethod
    def read_back(sample: HiddenStateSample) -> HiddenStateSample:
        """What readers must give for *sample*: itself, unless the transport codes states with a loss."""
        return sample

    @staticmethod
    def token_bytes(layout: StateLayout) -> int:
        """Bytes that a token takes at least."""
        width = {"bfloat16": 2, "float16": 2, "float32": 4}[layout.dtype]
        return 8 + len(layout.layer_ids) * layout.hidden_size * width

    @staticmethod
    def beside(transport: HiddenStateTransport) -> HiddenStateTransport:
        """Another run's transport, with the same options."""
        location = transport.location
        return type(transport)(transport.options, location.with_name(location.name + "-other"))

    @pytest.mark.parametrize("dtype", sorted(_DTYPES))
    def test_samples_are_bit_exact(self, transport: HiddenStateTransport, dtype: str) -> None:
        layout = make_layout(dtype)
        samples = [make_sample(number, layout) for number in range(12)]
        special = torch.tensor([0.0, -0.0, torch.finfo(_DTYPES[dtype]).max, torch.finfo(_DTYPES[dtype]).tiny])
        samples[0].hidden_states.view(-1)[:4] = special.to(_DTYPES[dtype])
        with transport.writer(layout) as writer:
            for sample in samples:
                writer.put(sample)
        for _ in ("as put", "at rest"):
            with transport.reader(layout) as reader:
                for sample in reversed(samples):
                    length = len(sample.token_ids)
                    assert_same(reader.get(sample.sample_id, expected_tokens=length), self.read_back(sample))
                assert reader.complete_ids() == {sample.sample_id for sample in samples}
            transport.compact(layout)

    def test_a_sample_may_be_a_view(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        sample = make_sample(5, layout, tokens=9)
        twisted = sample.hidden_states.transpose(0, 1).contiguous().transpose(0, 1)
        assert not twisted.is_contiguous()
        with transport.writer(layout) as writer:
            writer.put(
                HiddenStateSample(sample_id=sample.sample_id, token_ids=sample.token_ids, hidden_states=twisted)
            )
        with transport.reader(layout) as reader:
            assert_same(reader.get(sample.sample_id), self.read_back(sample))

    def test_a_reader_sees_what_is_put_after_it_was_opened(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        with transport.writer(layout) as writer, transport.reader(layout) as reader:
            assert reader.complete_ids() == frozenset()
            for number in range(3):
                writer.put(make_sample(number, layout))
                writer.flush()
                assert_same(reader.get(f"{number:032x}"), self.read_back(make_sample(number, layout)))
            transport.compact(layout)
            assert_same(reader.get(f"{1:032x}"), self.read_back(make_sample(1, layout)))

    def test_missing_samples_are_named(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        with transport.writer(layout) as writer:
            writer.put(make_sample(1, layout))
        with transport.reader(layout) as reader, pytest.raises(SampleMissing) as caught:
            reader.get("ab" * 16)
        assert caught.value.sample_id == "ab" * 16
        assert "ab" * 16 in str(caught.value)

    def test_another_length_than_expected_is_an_error(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        sample = make_sample(3, layout)
        with transport.writer(layout) as writer:
            writer.put(sample)
        with transport.reader(layout) as reader, pytest.raises(SampleCorrupt) as caught:
            reader.get(sample.sample_id, expected_tokens=len(sample.token_ids) + 1)
        assert caught.value.sample_id == sample.sample_id

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_values_that_are_not_finite_are_refused(self, transport: HiddenStateTransport, value: float) -> None:
        layout = make_layout()
        bad = make_sample(4, layout)
        bad.hidden_states.view(-1)[-1] = value
        with transport.writer(layout) as writer:
            with pytest.raises(SampleCorrupt) as caught:
                writer.put(bad)
            writer.put(make_sample(5, layout))
        assert caught.value.sample_id == bad.sample_id
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == {f"{5:032x}"}

    @pytest.mark.parametrize("other", ["dtype", "shape", "length"])
    def test_what_does_not_fit_the_layout_is_refused(self, transport: HiddenStateTransport, other: str) -> None:
        layout = make_layout()
        sample = make_sample(6, layout, tokens=8)
        states = {
            "dtype": sample.hidden_states.float(),
            "shape": sample.hidden_states[:, :-1],
            "length": sample.hidden_states[:-1],
        }[other]
        bad = HiddenStateSample(sample_id=sample.sample_id, token_ids=sample.token_ids, hidden_states=states)
        with transport.writer(layout) as writer, pytest.raises(SampleCorrupt):
            writer.put(bad)
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == frozenset()

    @pytest.mark.parametrize(
        "sample_id", ["", "../escape", "/etc/passwd", "A" * 32, "g" * 32, "0" * 31, "0" * 33, "0" * 32 + "\n"]
    )
    def test_ids_that_are_no_ids_are_refused(self, transport: HiddenStateTransport, sample_id: str) -> None:
        layout = make_layout()
        sample = make_sample(1, layout)
        bad = HiddenStateSample(sample_id=sample_id, token_ids=sample.token_ids, hidden_states=sample.hidden_states)
        with transport.writer(layout) as writer, pytest.raises(TransportError):
            writer.put(bad)
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == frozenset()
            with pytest.raises(SampleMissing):
                reader.get(sample_id)
            reader.delete(sample_id)

    def test_putting_again_and_deleting_again_are_harmless(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        sample = make_sample(7, layout)
        with transport.writer(layout) as writer:
            for _ in range(3):
                writer.put(sample)
            writer.flush()
            transport.compact(layout)
            writer.put(sample)
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == {sample.sample_id}
            assert_same(reader.get(sample.sample_id), self.read_back(sample))
            for _ in range(3):
                reader.delete(sample.sample_id)
            assert reader.complete_ids() == frozenset()
            with pytest.raises(SampleMissing):
                reader.get(sample.sample_id)

    def test_a_deleted_sample_stays_deleted_and_can_be_put_again(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        samples = [make_sample(number, layout) for number in range(6)]
        with transport.writer(layout) as writer:
            for sample in samples:
                writer.put(sample)
        transport.compact(layout)
        with transport.reader(layout) as reader:
            reader.delete(samples[2].sample_id)
        transport.compact(layout)
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == {sample.sample_id for sample in samples} - {samples[2].sample_id}
        with transport.writer(layout) as writer:
            writer.put(samples[2])
        transport.compact(layout)
        with transport.reader(layout) as reader:
            for sample in samples:
                assert_same(reader.get(sample.sample_id), self.read_back(sample))

    def test_runs_do_not_see_each_other(self, transport: HiddenStateTransport) -> None:
        layout, other = make_layout(), self.beside(transport)
        with transport.writer(layout) as mine, other.writer(layout) as theirs:
            mine.put(make_sample(1, layout))
            theirs.put(make_sample(2, layout))
        with transport.reader(layout) as mine_read, other.reader(layout) as their_read:
            assert mine_read.complete_ids() == {f"{1:032x}"}
            assert their_read.complete_ids() == {f"{2:032x}"}
            mine_read.delete(f"{2:032x}")
        transport.remove_all()
        with transport.reader(layout) as mine_read, other.reader(layout) as their_read:
            assert mine_read.complete_ids() == frozenset()
            assert_same(their_read.get(f"{2:032x}"), self.read_back(make_sample(2, layout)))

    def test_another_layout_is_refused(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        with transport.writer(layout) as writer:
            writer.put(make_sample(1, layout))
        others = (make_layout(fingerprint="0" * 32), make_layout(ids=3), make_layout("float32"))
        for other in others:
            with pytest.raises(FingerprintMismatch):
                transport.reader(other).get(f"{1:032x}")
            with pytest.raises(FingerprintMismatch):
                transport.writer(other).put(make_sample(1, other))

    def test_transport_and_reader_travel_into_workers(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        with transport.writer(layout) as writer:
            for number in range(8):
                writer.put(make_sample(number, layout))
        transport.compact(layout)
        with transport.reader(layout) as reader:
            reader.get(f"{0:032x}")  # a reader that already holds resources must travel as well
            copied = pickle.loads(pickle.dumps(reader))
            assert_same(copied.get(f"{1:032x}"), self.read_back(make_sample(1, layout)))
            copied.close()
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(2, mp_context=context) as pool:
                samples = [self.read_back(make_sample(number, layout)) for number in range(8)]
                pids = list(pool.map(_check_in_worker, [reader] * 2, [samples[:4], samples[4:]]))
        assert os.getpid() not in pids

    def test_several_writers(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        writers = [transport.writer(layout) for _ in range(3)]
        for number in range(9):
            writers[number % 3].put(make_sample(number, layout))
            writers[(number + 1) % 3].put(make_sample(number, layout))
        for writer in writers:
            writer.close()
            writer.close()
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == {f"{number:032x}" for number in range(9)}

    def test_remove_all_of_some(self, transport: HiddenStateTransport) -> None:
        layout = make_layout()
        with transport.writer(layout) as writer:
            for number in range(4):
                writer.put(make_sample(number, layout))
        transport.remove_all([f"{1:032x}", f"{9:032x}"])
        with transport.reader(layout) as reader:
            assert reader.complete_ids() == {f"{number:032x}" for number in (0, 2, 3)}

    def test_a_killed_writer_leaves_nothing_partial(self, transport: HiddenStateTransport) -> None:
        """kill -9 while it writes, again and again: what readers see is complete to the bit."""
        layout = make_layout()
        command = [sys.executable, "-c", _ENDLESS_WRITER]
        for pause in (0.0, 0.003, 0.011):
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump((transport, layout), process.stdin)
                process.stdin.close()
                announced = [int(process.stdout.readline()) for _ in range(3)]
                time.sleep(pause)
                process.send_signal(signal.SIGKILL)
                process.wait()
            with transport.reader(layout) as reader:
                found = reader.complete_ids()
                assert {f"{number:032x}" for number in announced} <= found
                for sample_id in found:
                    expected = make_sample(int(sample_id, 16), layout, tokens=20_000)
                    assert_same(reader.get(sample_id), self.read_back(expected))
        with transport.writer(layout) as writer:
            writer.put(make_sample(999, layout))
        transport.compact(layout)
        with transport.reader(layout) as reader:
            assert_same(reader.get(f"{999:032x}"), self.read_back(make_sample(999, layout)))

    def test_the_estimate_of_bytes_is_not_below_the_data(self, transport: HiddenStateTransport) -> None:
        for dtype in ("bfloat16", "float32"):
            layout = make_layout(dtype)
            at_rest = transport.bytes_for(layout, 1000, 10)
            assert at_rest >= 1000 * self.token_bytes(layout)
            assert transport.peak_bytes_for(layout, 1000, 10, longest=200) >= at_rest


class Fp8TransportTests(TransportTests):
    """The suite for a transport that keeps states in eight bits. Override :meth:`transport`."""

    @staticmethod
    def read_back(sample: HiddenStateSample) -> HiddenStateSample:
        states = fp8.decode(*fp8.encode(sample.hidden_states), sample.hidden_states.dtype)
        return attrs.evolve(sample, hidden_states=states)

    @staticmethod
    def token_bytes(layout: StateLayout) -> int:
        return 8 + fp8.stored_bytes(1, len(layout.layer_ids), layout.hidden_size)

    def test_it_takes_half_the_bytes(self, transport: HiddenStateTransport) -> None:
        layout = make_layout(ids=4, hidden_size=2048)
        plain = 10_000 * TransportTests.token_bytes(layout)
        assert transport.bytes_for(layout, 10_000, 10) < 0.51 * plain
