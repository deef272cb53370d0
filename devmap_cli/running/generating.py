"""From a loaded model and an encoded prompt to text, with the times it took."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from devmap_cli.model.kv_dtypes import AUTO, generation_options
from devmap_cli.running.report import Generation

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from devmap_cli.running.failures import Stage
    from devmap_cli.running.prompting import EncodedPrompt
    from devmap_cli.running.request import RunRequest


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: EncodedPrompt,
    request: RunRequest,
    max_new_tokens: int,
    *,
    kv_dtype: str = AUTO,
    stage: Stage,
    on_text: Callable[[str], None],
) -> Generation:
    """Generate from `prompt`, the KV cache in `kv_dtype`; the first sequence's text goes to `on_text` as it comes."""
    import torch

    if request.seed is not None:
        torch.manual_seed(request.seed)
    config = _generation_config(model, tokenizer, request, max_new_tokens)
    config.update(**generation_options(kv_dtype))
    device = input_device(model)
    stream = _TokenStream(tokenizer, stage, on_text)
    run: Any = model.generate  # its type says Tensor, by way of nn.Module.__getattr__
    output = run(
        input_ids=prompt.input_ids.to(device),
        attention_mask=prompt.attention_mask.to(device),
        generation_config=config,
        streamer=stream,
    )
    tokens = output[:, -stream.num_tokens :].cpu()
    return Generation(
        texts=tuple(str(tokenizer.decode(row, skip_special_tokens=True)) for row in tokens),
        num_prompt_tokens=prompt.num_tokens,
        num_new_tokens=_num_until_end(tokens[0].tolist(), config),
        stop_reason=_stop_reason(tokens[0].tolist(), config),
        seconds_to_first_token=stream.times[0] - stream.started,
        decode_tokens_per_second=stream.decode_tokens_per_second(request.batch_size),
        seconds=stream.times[-1] - stream.started,
        used_chat_template=prompt.used_chat_template,
    )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the inputs go: where the root's hook computes, as the parameters themselves may be offloaded."""
    import torch

    hook = getattr(model, "_hf_hook", None)
    return model.device if hook is None else torch.device(hook.execution_device)


def _generation_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: RunRequest, max_new_tokens: int
) -> GenerationConfig:
    """The model's own settings, with the request's in place of theirs; one beam, as only that can stream."""
    config = copy.deepcopy(model.generation_config)
    assert config is not None
    config.max_length, config.max_new_tokens = None, max_new_tokens
    config.num_beams, config.num_return_sequences = 1, 1
    config.do_sample = request.temperature > 0
    config.temperature = request.temperature or None
    if not config.do_sample:
        config.top_p, config.top_k = None, None
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else _end_tokens(config)[:1]
    return config


def _end_tokens(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else [int(end) for end in ends]


def _num_until_end(tokens: list[int], config: GenerationConfig) -> int:
    """Tokens up to the first end-of-sequence token, with it: the rest pads it to the longest sequence."""
    ends = set(_end_tokens(config))
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))


def _stop_reason(tokens: list[int], config: GenerationConfig) -> str:
    if set(tokens) & set(_end_tokens(config)):
        return "end of sequence"
    return "max new tokens" if len(tokens) == config.max_new_tokens else "stopped by the model's settings"


class _TokenStream:
    """What generate() hands its tokens to: notes the times and decodes the first sequence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stage: Stage, on_text: Callable[[str], None]) -> None:
        from transformers import TextStreamer

        text_streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True)
        text_streamer.on_finalized_text = lambda text, **_: on_text(text) if text else None
        self._text = text_streamer
        self._stage = stage
        self._has_prompt = False
        self.times: list[float] = []
        self.started = time.perf_counter()
        stage.phase = "prefill"

    @property
    def num_tokens(self) -> int:
        """New tokens per sequence."""
        return len(self.times)

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt (the first call) or one new token of every sequence, of shape (batch size,)."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.times.append(time.perf_counter())
        self._stage.phase = "decode"
        self._text.put(tokens[:1])

    def end(self) -> None:
        """Give out what is still held back."""
        self._text.end()

    def decode_tokens_per_second(self, batch_size: int) -> float | None:
        """Tokens of all sequences per second after the first ones; None without second ones."""
        if len(self.times) < 2:
            return None
        return batch_size * (len(self.times) - 1) / (self.times[-1] - self.times[0])
