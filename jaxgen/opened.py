"""A model opened but not loaded: all that can be refused is, before a weight is read or placed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxgen.config import EngineConfig
from jaxgen.engine.build import Described, PolicyName, describe
from jaxgen.engine.frame import longest_context
from jaxgen.sampling import SamplingParams
from jaxgen.schedule.verdict import SchedulingError, SchedulingResult
from jaxgen.text.checkpoint_tokenizer import checkpoint_tokenizer
from jaxgen.text.tokenizer import Tokenizer
from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_models.generation_config import end_token_ids, sampling_defaults


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A mapped checkpoint with its tokenizer (None if it has none) and generation defaults.

    max_context: tokens of the longest sequence, prompt and output together. load_format: as
    `load_model` takes it.
    """

    config: EngineConfig
    described: Described
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    max_context: int
    load_format: str = "auto"

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; RefusedInput where the checkpoint has none."""
        if self.tokenizer is None:
            raise RefusedInput(
                "the checkpoint has no tokenizer: name a folder that has one (--tokenizer), or "
                "give prompts as token ids"
            )
        return self.tokenizer

    def default_sampling_params(self, **changes: Any) -> SamplingParams:  # noqa: ANN401
        """What the checkpoint's generation_config asks for, with changes by name."""
        return SamplingParams.from_mapping({**self.sampling_defaults, **changes})

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuses token ids outside the vocabulary, and what is longer than the context."""
        vocab = int(self.described.policy.config.vocab_size)
        params.validate(vocab)
        outside = [token for token in prompt_ids if not 0 <= token < vocab]
        if outside or not prompt_ids:
            what = f"token ids {outside[:5]}" if outside else "no tokens at all"
            raise RefusedInput(f"the prompt has {what}; the vocabulary is 0 to {vocab - 1}")
        tokens = len(prompt_ids) + (params.max_tokens or 1)
        if tokens > self.max_context:
            raise SchedulingError(
                SchedulingResult.SequenceTokenLimitExceeded,
                f"{len(prompt_ids)} prompt tokens and {params.max_tokens or 1} to come; the "
                f"context has {self.max_context}.",
            )


def open_model(
    model: str | Path | Checkpoint,
    config: EngineConfig,
    *,
    tokenizer: str | Path | None = None,
    chat_template: str | None = None,
    policy: PolicyName = None,
    load_format: str = "auto",
) -> OpenedModel:
    """Opens a folder, a .gguf file or a snapshot; RefusedInput for whatever cannot be served.

    tokenizer: a folder to take it from instead. chat_template: its text, instead of the model's.
    load_format: "dummy" will make random weights instead of reading any.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    described = describe(checkpoint, config, policy=policy)
    vocab = int(described.policy.config.vocab_size)
    return OpenedModel(
        config=config,
        described=described,
        tokenizer=checkpoint_tokenizer(
            checkpoint, vocab_size=vocab, folder=tokenizer, chat_template=chat_template
        ),
        eos_ids=end_token_ids(checkpoint.generation_config, described.policy.config),
        sampling_defaults=sampling_defaults(checkpoint.generation_config),
        max_context=longest_context(described.policy, config),
        load_format=load_format,
    )
