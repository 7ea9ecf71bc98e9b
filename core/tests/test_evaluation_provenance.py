"""An evaluation says where and with what it was made."""

from __future__ import annotations

import json
import subprocess
import sys

from draftsmith import __version__
from draftsmith.evaluation.provenance import provenance
from draftsmith.verifier import read_verifier


def test_what_two_evaluations_may_differ_in_is_told(verifier_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    facts = read_verifier(verifier_folder)
    told = provenance(
        ["draftsmith", "evaluate", "x"], facts, [verifier_folder], ["VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS"]
    )
    assert json.loads(json.dumps(told)) == told
    assert told["command"] == ["draftsmith", "evaluate", "x"]
    assert told["versions"]["draftsmith"] == __version__
    assert told["versions"]["torch"]
    assert told["machine"]["cores"] >= 1
    assert told["environment"] == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert told["verifier"] == {"path": str(verifier_folder), "fingerprint": facts.fingerprint}
    first = told["checkpoints"][str(verifier_folder)]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in verifier_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert provenance([], None, [copy])["checkpoints"] == {str(copy): first}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    assert provenance([], None, [copy])["checkpoints"] != {str(copy): first}


def test_reading_an_evaluation_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from draftsmith.evaluation import metrics, provenance, require, results\n"
        "sys.exit(' '.join(name for name in ('torch', 'transformers', 'numpy', 'vllm') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
