"""From a prompt's text to the token ids that generate() takes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devmap_cli.errors import RequestError, SurroundingsError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from devmap_cli.model.reference import ModelReference


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids and attention mask, both of shape (batch size, prompt tokens), on the host."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    used_chat_template: bool

    @property
    def num_tokens(self) -> int:
        """Tokens per sequence."""
        return int(self.input_ids.shape[1])


def load_tokenizer(reference: ModelReference, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that comes with a model, with the processor's chat template where it has none of its own.

    Raises:
        RequestError: the model has no tokenizer.
        SurroundingsError: the tokenizer needs a package that is missing.
    """
    from transformers import AutoTokenizer

    where = {"revision": reference.revision, "trust_remote_code": trust_remote_code}
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(reference.location, **where)
    except ImportError as error:
        raise SurroundingsError(
            f"the tokenizer of {reference.location} needs a package: {first_line(error)}",
            "pip install sentencepiece tiktoken protobuf",
        ) from error
    except Exception as error:  # tokenizer files of every age and kind: each fails in its own way
        raise _no_tokenizer(reference) from error
    if not len(tokenizer):
        raise _no_tokenizer(reference)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _processor_template(reference, where)
    return tokenizer


def _no_tokenizer(reference: ModelReference) -> RequestError:
    return RequestError(
        f"{reference.location} has no tokenizer that transformers can read",
        "put tokenizer.json and tokenizer_config.json beside config.json",
    )


def _processor_template(reference: ModelReference, where: dict[str, Any]) -> str | None:
    """The chat template of a multimodal model's processor, or None: plain text works without."""
    if not (reference.folder / "processor_config.json").is_file():
        return None
    from transformers import AutoProcessor

    try:
        from_pretrained: Any = AutoProcessor.from_pretrained  # untyped
        template = from_pretrained(reference.location, **where).chat_template
    except (ImportError, OSError, ValueError):
        return None
    return template if isinstance(template, str) else None


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, *, raw: bool, batch_size: int) -> EncodedPrompt:
    """The prompt `batch_size` times over, in the chat template if there is one and `raw` does not forbid it.

    Raises:
        RequestError: the chat template fails, or the prompt has no tokens.
    """
    in_template = not raw and tokenizer.chat_template is not None
    encoded = _in_template(tokenizer, prompt) if in_template else tokenizer(prompt, return_tensors="pt")
    if not encoded["input_ids"].numel():
        raise RequestError("the tokenizer makes no tokens of the prompt", "give another prompt")
    return EncodedPrompt(
        encoded["input_ids"].long().repeat(batch_size, 1),
        encoded["attention_mask"].long().repeat(batch_size, 1),
        used_chat_template=in_template,
    )


def _in_template(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    except ImportError:
        raise
    except Exception as error:  # a template is a program of the model's author: it can fail in any way
        raise RequestError(
            f"the model's chat template fails: {first_line(error)}", "leave it out with --raw"
        ) from error
