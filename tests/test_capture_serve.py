"""`draftsmith capture serve` and what asks it, against a real vLLM: what is stored, what is refused, what dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import httpx
import pytest
import torch
from ports import free_port

from draftsmith.capture import engines
from draftsmith.capture.address import TransportAddress, open_transport
from draftsmith.capture.endpoints import CapturePool, EndpointFailed, Expected, ServerEndpoint
from draftsmith.capture.engines import CaptureSetup, Request
from draftsmith.capture.engines.messages import capture_parameters, token_digest
from draftsmith.capture.engines.vllm import VllmEngine
from draftsmith.capture.server.command import capture_server
from draftsmith.capture.states import state_layout
from draftsmith.cli.common import load_run
from draftsmith.errors import EndpointMismatch, ServingError, UserError, VerifierError
from draftsmith.testing.verifiers import make_tiny_verifier
from draftsmith_hs_file.options import FileOptions
from draftsmith_hs_file.plugin import draftsmith_transports

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone]

LONGEST = 96
DRAW = random.Random(3)


def rows(count: int, longest: int = LONGEST) -> list[Request]:
    """New ones at each call."""
    return [
        Request(
            f"{DRAW.getrandbits(128):032x}", [DRAW.randrange(5, 300) for _ in range(DRAW.randrange(1, longest + 1))]
        )
        for _ in range(count)
    ]


class Serve:
    """A server of its own session, started as a user does."""

    def __init__(self, recipe: Path, log: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.log = log
        command = [sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe), "--port", str(port)]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float = 240) -> Serve:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/draftsmith/capture", timeout=5).status_code == 200:
                    return self
            time.sleep(0.5)
        pytest.fail(f"the server does not answer:\n{self.log.read_text()[-3000:]}")

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self.signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its conversations are not on this host, as on one that only captures."""
    folder = tmp_path_factory.mktemp("serve")
    verifier = make_tiny_verifier(folder / "verifier", "llama")
    path = folder / "recipe.yaml"
    path.write_text(
        f"verifier: {verifier}\nalgorithm: eagle3\noutput: {folder / 'out'}\n"
        f"transport: {{name: hs_file, options: {{folder: {folder / 'states'}}}}}\n"
        f"data: {{sources: [elsewhere.jsonl], max_length: {LONGEST}}}\n"
        "capture: {mode: online, dtype: float32, store_dtype: float32, batch_tokens: 128}\n"
    )
    return path


@pytest.fixture(scope="module")
def run(recipe: Path):
    return load_run(recipe, stages=())


@pytest.fixture(scope="module")
def server(recipe: Path) -> Iterator[Serve]:
    started = Serve(recipe, recipe.parent / "server.log")
    try:
        yield started.wait()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def transport(run):
    return open_transport(run.transport, run.transport_options, run.folders.states / "samples")


@pytest.fixture(scope="module")
def layout(run):
    return state_layout(run)


@pytest.fixture(scope="module")
def expected(run, transport, layout) -> Expected:
    return Expected.of(
        model=str(run.verifier.path),
        verifier=run.verifier.fingerprint,
        transport=transport,
        layout=layout,
        longest=LONGEST,
    )


def all_stored(transport, layout, requests: Sequence[Request]) -> None:
    with transport.reader(layout) as reader:
        for each in requests:
            sample = reader.get(each.sample_id, expected_tokens=len(each.token_ids))
            assert sample.token_ids.tolist() == list(each.token_ids)


def test_states_are_those_of_the_offline_engine(server, run, transport, layout, expected, tmp_path) -> None:
    wanted = rows(24)
    with CapturePool([ServerEndpoint(server.url, expected)], in_flight=8, patience=60, say=print) as pool:
        for row, future in [(row, pool.submit(row)) for row in wanted]:
            answer = future.result(120)
            assert (answer.sample_id, answer.refused) == (row.sample_id, None)
            assert answer.seconds > 0
    all_stored(transport, layout, wanted)
    setup = CaptureSetup(
        verifier=run.verifier, layout=layout, dtype="float32", batch_tokens=128, longest=LONGEST, work_folder=tmp_path
    )
    described = draftsmith_transports()[0]
    offline = open_transport(described, FileOptions(), tmp_path / "offline")
    with VllmEngine(setup, TransportAddress.of(described, FileOptions(), tmp_path / "offline", layout)) as engine:
        assert sum(len(done.stored) for done in engine.capture(wanted)) == len(wanted)
    with transport.reader(layout) as ours, offline.reader(layout) as theirs:
        for row in wanted:
            torch.testing.assert_close(
                ours.get(row.sample_id).hidden_states, theirs.get(row.sample_id).hidden_states, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"verifier": "0" * 32, "model": "/models/other"}, "serves another model: .* /models/other here has 0000"),
        ({"place": "/elsewhere"}, "stores in another place: .*, this run reads /elsewhere"),
        ({"implementation": "other:Transport"}, "by another transport: draftsmith_hs_file.*other:Transport"),
        ({"longest": LONGEST + 1}, f"rows have {LONGEST} tokens at most, the longest of this run {LONGEST + 1}"),
        ({"layer_ids": (1, 8)}, r"taps layers \[.*\], this run needs \[1, 8\]"),
        ({"dtype": "bfloat16"}, "dtype is float32, this run's bfloat16"),
        ({"fingerprint": "1" * 32}, "states are of another run .*here 1111"),
    ],
)
def test_a_server_that_captures_something_else_is_told_apart(server, expected, changes, says) -> None:
    own = {key: value for key, value in changes.items() if key in {each.name for each in attrs.fields(Expected)}}
    other = {key: value for key, value in changes.items() if key not in own}
    wanted = attrs.evolve(expected, layout=attrs.evolve(expected.layout, **other), **own)
    with pytest.raises(EndpointMismatch, match=says) as caught:
        ServerEndpoint(server.url, wanted).open()
    assert caught.value.where == server.url
    assert "draftsmith capture serve" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prefix_caching": True}, "prefix caching is on"),
        ({"problem": "the installed vLLM is too old: it has no method"}, r"too old.*\(vLLM 0"),
        ({"protocol": 99}, "another protocol"),
        ({"layer_ids": None}, "taps no layers"),
        ({"layout": {}}, "cannot be read"),
    ],
)
def test_facts_that_no_server_of_ours_has_are_refused(server, expected, change, says) -> None:
    """What cannot be had of the installed vLLM: its own facts, changed on the way here."""
    facts = httpx.get(server.url + "/draftsmith/capture").json()
    endpoint = ServerEndpoint(server.url, expected)
    endpoint._client = httpx.Client(
        base_url="http://changed",
        transport=httpx.MockTransport(lambda request: httpx.Response(200, json={**facts, **change})),
    )
    with pytest.raises(EndpointMismatch, match=says):
        endpoint.open()


def test_the_facts_are_the_engines_own(server, run, layout) -> None:
    facts = httpx.get(server.url + "/draftsmith/capture").json()
    assert facts["verifier"] == run.verifier.fingerprint
    assert tuple(facts["layer_ids"]) == layout.layer_ids
    assert facts["layout"] == json.loads(json.dumps(attrs.asdict(layout)))
    assert (facts["dtype"], facts["max_model_len"], facts["prefix_caching"]) == ("float32", LONGEST + 2, False)


def ask(server: Serve, **order: object) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 1, **order}, timeout=60)


def test_other_requests_pass_untouched(server) -> None:
    reply = ask(server, prompt=[5, 6, 7, 8], max_tokens=3)
    assert reply.status_code == 200
    assert reply.json()["usage"] == {"prompt_tokens": 4, "total_tokens": 7, "completion_tokens": 3} | {
        key: value for key, value in reply.json()["usage"].items() if value is None
    }
    assert "draftsmith" not in reply.json()
    assert ask(server, stream=True).text.rstrip().endswith("data: [DONE]")
    assert httpx.post(server.url + "/v1/completions", content=b"no JSON").status_code == 400


def test_what_is_no_capture_of_one_row_is_refused(server, transport, layout) -> None:
    sample_id = "ab" * 16
    good = capture_parameters(sample_id, token_digest([5, 6, 7]))
    for says, order in {
        "not streamed": {"stream": True},
        "list of token ids": {"prompt": "hello"},
        "n must be 1": {"n": 2},
        "max_tokens must be 1": {"max_tokens": 2},
        "32 hex digits": {"kv_transfer_params": capture_parameters("../../etc/passwd", "0")},
        "digest": {"kv_transfer_params": {"draftsmith": {"sample_id": sample_id}}},
    }.items():
        reply = ask(server, **{"kv_transfer_params": good, **order})
        assert reply.status_code == 400
        assert says in reply.json()["error"]["message"]
    reply = httpx.post(
        server.url + "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "kv_transfer_params": good},
    )
    assert reply.status_code == 400
    assert "captured by /v1/completions" in reply.text
    with transport.reader(layout) as reader:
        assert sample_id not in reader.complete_ids()


def test_other_tokens_than_were_announced_are_never_stored(server, expected, transport, layout) -> None:
    row = rows(1)[0]
    told = ask(
        server, prompt=list(row.token_ids), kv_transfer_params=capture_parameters(row.sample_id, "0" * 16)
    ).json()["draftsmith"]
    assert told["status"] == "failed"
    assert "other token ids" in told["why"]
    assert (told["tokens"], told["digest"]) == (len(row.token_ids), token_digest(row.token_ids))
    with transport.reader(layout) as reader:
        assert row.sample_id not in reader.complete_ids()
    endpoint = ServerEndpoint(server.url, expected)
    with pytest.raises(ServingError, match=f"ran other tokens.*{len(row.token_ids) + 1} tokens"):
        endpoint._outcome(Request(row.sample_id, [*row.token_ids, 5]), {**told, "status": "stored"})
    with pytest.raises(ServingError, match="refuses sample"):
        endpoint.capture(Request(row.sample_id, [5] * (LONGEST + 20)))


def test_a_store_that_is_away_fails_its_samples_and_not_the_engine(server, expected, transport, layout) -> None:
    folder, aside = transport.folder, transport.folder.with_name("aside")
    if folder.exists():
        folder.rename(aside)
    folder.write_text("no folder")
    one, two = rows(2)
    endpoint = ServerEndpoint(server.url, expected)
    try:
        with pytest.raises((EndpointFailed, ServingError), match=f"{one.sample_id} was not stored"):
            endpoint.capture(one)
    finally:
        folder.unlink()
        if aside.exists():
            aside.rename(folder)
    endpoint.open()
    assert endpoint.capture(two).refused is None
    all_stored(transport, layout, [two])


def test_clients_that_leave_keep_nothing_in_the_server(server, expected, transport, layout) -> None:
    impatient = ServerEndpoint(server.url, expected, timeout=0.02)
    with ThreadPoolExecutor(16) as pool:
        left = [pool.submit(impatient.capture, each) for each in rows(64)]
        failed = sum(isinstance(each.exception(), EndpointFailed) for each in left)
    assert failed > 0
    patient = ServerEndpoint(server.url, expected)
    after = rows(8)
    assert [patient.capture(each).sample_id for each in after] == [each.sample_id for each in after]
    all_stored(transport, layout, after)


def test_the_port_is_taken(server, recipe) -> None:
    port = server.url.rpartition(":")[2]
    told = subprocess.run(
        [sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe), "--port", port],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 1
    assert f"port {port} cannot be used: Address already in use" in told.stderr


def test_frozen_then_killed_the_other_server_does_its_work(server, recipe, expected, transport, layout) -> None:
    """A frozen server is noticed within the timeout, and what it publishes late harms nobody; then it is killed."""
    second = Serve(recipe, recipe.parent / "second.log")
    lines: list[str] = []
    try:
        second.wait()
        ends = [ServerEndpoint(url, expected, timeout=10) for url in (server.url, second.url)]
        with CapturePool(ends, in_flight=4, patience=120, say=lines.append) as pool:
            assert pool.submit(rows(1)[0]).result(60)
            second.signal(signal.SIGSTOP)
            wanted = rows(40)
            futures = [pool.submit(each) for each in wanted]
            assert {each.result(60).sample_id for each in futures} == {each.sample_id for each in wanted}
            assert pool.retried >= 1
            assert lines[0].startswith(f"capture endpoint {second.url} failed: no answer within 10 s; its requests go")
            all_stored(transport, layout, wanted)
            second.signal(signal.SIGCONT)
            deadline = time.monotonic() + 120
            while not any("works again" in line for line in lines) and time.monotonic() < deadline:
                time.sleep(0.2)
            assert lines[-1].startswith(f"capture endpoint {second.url} works again after")
            all_stored(transport, layout, wanted)  # and what it had begun is published by now: the same

            wanted = rows(60)
            before = pool.retried
            timer = threading.Timer(0.3, second.signal, [signal.SIGKILL])
            timer.start()
            futures = [pool.submit(each) for each in wanted]
            assert {each.result(60).sample_id for each in futures} == {each.sample_id for each in wanted}
            timer.join()
            futures = [pool.submit(each) for each in rows(8)]
            assert all(each.result(60).refused is None for each in futures)
            all_stored(transport, layout, wanted)
            assert pool.retried > before
            assert any(line.startswith(f"capture endpoint {second.url} failed") for line in lines[2:])
    finally:
        second.stop()


def test_a_draft_is_trained_on_what_the_server_captures(server, recipe, run, transport, layout) -> None:
    """The same recipe on both sides; every row of both epochs is captured, and nothing stays."""
    chats = [
        {"messages": [{"role": "user", "content": f"count to {n}"}, {"role": "assistant", "content": "1 2 3 " * n}]}
        for n in range(2, 14)
    ]
    (recipe.parent / "elsewhere.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))
    settings = [f"online.endpoints=[{server.url}]", "train.epochs=2", "train.tokens_per_row=128", "observers=[]"]
    command = [sys.executable, "-m", "draftsmith", "run", str(recipe), "--until", "train", "--overwrite"]
    told = subprocess.run(
        [*command, *(word for each in settings for word in ("--set", each))], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
    record = json.loads((run.folders.output / "training" / "stage.json").read_text())
    assert record["complete"]
    assert record["summary"]["online"]["captured"] >= 2 * len(chats)
    with transport.reader(layout) as reader:
        assert not reader.complete_ids()


# --- without a server ---------------------------------------------------------------------------------------------


def test_nothing_answers_there(expected) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(EndpointFailed, match="cannot be reached") as caught:
        ServerEndpoint(url, expected).open()
    assert time.monotonic() - started < 30  # seconds, not the minutes that a request may take
    assert caught.value.where == url


def test_something_else_answers_there(expected, tmp_path) -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    with pytest.raises(EndpointMismatch, match="not started by `draftsmith capture serve`"):
                        ServerEndpoint(f"http://127.0.0.1:{port}", expected).open()
                    break
                except EndpointFailed:
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
        finally:
            child.kill()


def test_what_cannot_serve_captures_is_told_before_anything_starts(run, recipe, monkeypatch) -> None:
    def refused(run, error, says):
        with pytest.raises(error, match=says):
            capture_server(run, host="127.0.0.1", port=8000)

    for problem in (
        "vLLM is not installed",
        "the installed vLLM is too old: it has no method to extract hidden states",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(engines, "vllm_problem", lambda problem=problem: problem)
            refused(run, ServingError, problem)
    untapped = attrs.evolve(run.verifier, architectures=("MiMoForCausalLM",))
    refused(attrs.evolve(run, verifier=untapped), ServingError, "does not hand out the hidden states of MiMo")
    hybrid = attrs.evolve(run.verifier, text_config={**run.verifier.text_config, "mamba_d_state": 16})
    refused(attrs.evolve(run, verifier=hybrid), VerifierError, "hybrid")
    offline = load_run(recipe, ["capture.mode=offline"], stages=())
    refused(offline, UserError, "the recipe captures in a stage of its own")


def test_a_store_that_is_not_there_is_told_before_vllm_starts(recipe) -> None:
    store = f"127.0.0.1:{free_port()}"
    options = {"transport.name": "hs_mooncake", "transport.options": f"{{master: '{store}', admin: '{store}'}}"}
    told = subprocess.run(
        [sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe), "--port", str(free_port())]
        + [word for key, value in options.items() for word in ("--set", f"{key}={value}")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 1
    assert store in told.stderr
    assert "draftsmith store status" in told.stderr
    assert told.stdout == ""


def test_the_command_can_be_pasted(recipe) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe), "--dry-run", "--vllm=--max-model-len=3"],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 2
    assert "--max-model-len decides what is captured" in told.stderr
    for options, problem in (("--port 9", "--port is not for --vllm"), ("--a 'b", "No closing quotation")):
        command = [sys.executable, "-m", "draftsmith", "capture", "serve", str(recipe), "--dry-run"]
        told = subprocess.run([*command, f"--vllm={options}"], capture_output=True, text=True)
        assert told.returncode == 2
        assert problem in told.stderr
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "draftsmith",
            "capture",
            "serve",
            str(recipe),
            "--dry-run",
            "--vllm=--uvicorn-log-level=error --max-num-seqs 8",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(told.stdout.replace("\\\n", " "))
    assert words[0] == "env"
    assert words[-3:] == ["--uvicorn-log-level=error", "--max-num-seqs", "8"]
    assert "--no-enable-prefix-caching" in words
    assert words[words.index("--max-model-len") + 1] == str(LONGEST + 2)
    taps = json.loads(words[words.index("--speculative-config") + 1])
    assert taps["method"] == "extract_hidden_states"
    assert re.search(r"^  VLLM_CPU_KVCACHE_SPACE=1 \\$", told.stdout, re.MULTILINE)
