"""Every config.json of a collection of real ones builds, or is refused for a reason that is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from devmap_cli.errors import DevmapError
from devmap_cli.model.census import module_spec
from devmap_cli.model.empty import build_empty, choose_dtype, load_config
from devmap_cli.model.quiet import quiet_libraries
from devmap_cli.model.reference import resolve

CONFIGS = Path(__file__).parents[3] / "shared" / "corpus" / "configs"
OWN_CODE = "needs code from its own repository"
UNKNOWN = "does not know the architecture"
REFUSED = {
    "DAMO-NLP-SG__VideoLLaMA3-7B-CogStream": OWN_CODE,
    "MiniMaxAI__MiniMax-M3": UNKNOWN,
    "Qwen__Qwen-72B": OWN_CODE,
    "Salesforce__xgen-mm-phi3": OWN_CODE,
    "THUDM__chatglm3-6b": OWN_CODE,
    "THUDM__cogvlm2-llama3-caption": OWN_CODE,
    "XiaomiMiMo__MiMo-7B-Base": UNKNOWN,
    "baichuan-inc__Baichuan2-7B-Chat": OWN_CODE,
    "cyan2k__molmo-7B-D-bnb-4bit": OWN_CODE,
    "databricks__dbrx-instruct": "is not valid for dbrx: Validation error for field 'ffn_act_fn'",
    "deepseek-ai__Janus-1.3B": UNKNOWN,
    "deepseek-ai__deepseek-vl2-tiny": UNKNOWN,
    "internlm__internlm-20b": OWN_CODE,
    "internlm__internlm2-7b": OWN_CODE,
    "internlm__internlm2-7b-reward": OWN_CODE,
    "microsoft__Phi-3-small-8k-instruct": OWN_CODE,
    "microsoft__Phi-3-vision-128k-instruct": OWN_CODE,
    "moonshotai__Kimi-K2-Instruct": OWN_CODE,
    "moonshotai__Kimi-K3": OWN_CODE,
    "nvidia__Llama-3_3-Nemotron-Super-49B-v1": OWN_CODE,
    "sgl-project__DeepSeek-V4-Flash-FP8": UNKNOWN,
    "xverse__XVERSE-7B": OWN_CODE,
}


def one_of_each() -> Iterator[Path]:
    """The first folder of each model type and list of architectures."""
    seen = set()
    for path in sorted(CONFIGS.glob("*/config.json")):
        config = json.loads(path.read_text())
        kind = (config.get("model_type"), *(config.get("architectures") or ()))
        if kind not in seen:
            seen.add(kind)
            yield path.parent


FOLDERS = list(one_of_each())
pytestmark = pytest.mark.skipif(not FOLDERS, reason=f"no collection of configs at {CONFIGS}")


def build(folder: Path) -> tuple[int, int]:
    """The number of tensors of the empty model, and their bytes."""
    with quiet_libraries():
        reference = resolve(str(folder))
        config = load_config(reference, trust_remote_code=False)
        dtype, _ = choose_dtype(reference, config, None, trust_remote_code=False)
        model = build_empty(reference, config, dtype, trust_remote_code=False)
    tensors = [tensor for _, module in module_spec(model, frozenset()).walk() for tensor in module.tensors]
    return len(tensors), sum(tensor.num_bytes for tensor in tensors)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.name not in REFUSED], ids=lambda f: f.name)
def test_it_builds(folder: Path) -> None:
    num_tensors, num_bytes = build(folder)
    assert num_tensors > 20
    assert num_bytes > 10**7


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder.name in REFUSED], ids=lambda f: f.name)
def test_it_is_refused_for_a_known_reason(folder: Path) -> None:
    with pytest.raises(DevmapError) as caught:
        build(folder)
    assert REFUSED[folder.name] in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_the_list_of_refused_ones_has_no_stranger() -> None:
    assert set(REFUSED) <= {folder.name for folder in FOLDERS}
