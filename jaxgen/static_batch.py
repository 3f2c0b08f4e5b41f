"""`init_inference`: DeepSpeed's door for the user with a rectangular batch of token ids.

Arguments that change what is computed are honoured or refused by name; none is ignored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen.engine.build import PolicyName
from jaxgen.engine.outputs import FinishReason
from jaxgen.llm import LLM
from jaxgen.sampling import SamplingParams
from jaxgen_checkpoints.errors import ConfigError, RefusedInput
from jaxgen_models.policy import InferencePolicy

DEFAULT_MAX_OUT_TOKENS = 1024


class StaticBatchEngine:
    """Generates for padded [batch, length] arrays, as transformers' `generate` does."""

    def __init__(self, llm: LLM, max_out_tokens: int) -> None:
        self.llm = llm
        self._max_out_tokens = max_out_tokens

    def generate(
        self,
        input_ids: Any,  # noqa: ANN401 (anything numpy can read)
        attention_mask: Any = None,  # noqa: ANN401
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int | None = None,
        num_beams: int = 1,
        pad_token_id: int | None = None,
    ) -> np.ndarray:
        """int32 [batch, length + new]: each row's ids followed by its continuation, then padding.

        attention_mask: 0 where a row is padding, on either side; all ones if absent. Without
        lengths the sequence grows to max_out_tokens. RefusedInput for inputs that are longer than
        that, and for beam search; RuntimeError for a row that no token could be drawn for.
        """
        if num_beams != 1:
            raise RefusedInput("num_beams: beam search is not supported; use num_beams=1")
        ids = np.asarray(input_ids)
        if ids.ndim != 2 or not ids.size:
            raise RefusedInput(f"input_ids must be [batch, length], got shape {ids.shape}")
        everything = np.ones(ids.shape, bool)
        mask = everything if attention_mask is None else np.asarray(attention_mask) > 0
        if mask.shape != ids.shape:
            raise RefusedInput(f"attention_mask has shape {mask.shape}, input_ids {ids.shape}")
        longest = int(mask.sum(axis=1).max())
        limit = self._max_out_tokens if max_length is None else max_length
        new = limit - longest if max_new_tokens is None else max_new_tokens
        if longest + new > self._max_out_tokens or new < 1:
            raise RefusedInput(
                f"input of {longest} tokens with {new} new ones exceeds max_out_tokens = "
                f"{self._max_out_tokens}"
            )
        padding = self._padding(pad_token_id)
        params = SamplingParams(
            temperature=temperature if do_sample else 0.0,
            top_k=top_k if do_sample else 0,
            top_p=top_p if do_sample else 1.0,
            max_tokens=new,
            seed=seed,
            detokenize=False,
        )
        rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
        outputs = self.llm.generate(rows, params)
        completions = [output.outputs[0] for output in outputs]
        for row, completion in enumerate(completions):
            if completion.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"row {row}: {completion.error}")
        answers = [completion.token_ids for completion in completions]
        width = max(len(answer) for answer in answers)
        tail = np.full((len(rows), width), padding, np.int32)
        for row, answer in zip(tail, answers, strict=True):
            row[: len(answer)] = answer
        return np.concatenate([ids.astype(np.int32), tail], axis=1)

    def _padding(self, asked: int | None) -> int:
        if asked is not None:
            if not abs(asked) < 2**31:
                raise RefusedInput(f"pad_token_id must be a number of 32 bits, not {asked}")
            return asked
        tokenizer = self.llm.tokenizer
        if tokenizer is not None and tokenizer.pad_id is not None:
            return tokenizer.pad_id
        return self.llm.eos_ids[0] if self.llm.eos_ids else 0


def init_inference(
    model: str | Path,
    *,
    tensor_parallel: Mapping[str, Any] | int | None = None,
    dtype: Any = "auto",  # noqa: ANN401 (a name or anything with one)
    max_out_tokens: int | None = None,
    replace_with_kernel_inject: bool = True,
    injection_policy: PolicyName = None,
    **others: Any,  # noqa: ANN401 (refused by name)
) -> StaticBatchEngine:
    """An engine with `.generate` for padded batches.

    Args:
      model: a checkpoint folder, a .gguf file or a snapshot.
      tensor_parallel: {"tp_size": n}, or n.
      max_out_tokens: tokens of the longest sequence, input included; absent, 1024 or what the
        model can do, if that is less.
      replace_with_kernel_inject: use the built-in policy for the architecture; there is no other
        way to run a model here, so False needs an injection_policy.
      injection_policy: a policy class of your own, a family's name, or "auto".
    Raises:
      RefusedInput: for DeepSpeed arguments that have no meaning here, by name, and for a model
        that no policy fits.
    """
    if others:
        raise ConfigError(
            f"init_inference does not take {', '.join(sorted(others))}; it takes tensor_parallel, "
            "dtype, max_out_tokens, replace_with_kernel_inject and injection_policy"
        )
    if not replace_with_kernel_inject and injection_policy is None:
        raise ConfigError(
            "replace_with_kernel_inject=False needs an injection_policy: a policy is the only way "
            "to run a model"
        )
    if isinstance(injection_policy, Mapping):
        raise ConfigError(
            "injection_policy takes a policy class (a subclass of "
            f"{InferencePolicy.__name__}) or a family's name, not a mapping of torch layers"
        )
    parallel = {"tp_size": tensor_parallel} if isinstance(tensor_parallel, int) else tensor_parallel
    config = {"tensor_parallel": dict(parallel)} if parallel else {}
    llm = LLM(model, config, policy=injection_policy, dtype=dtype, max_model_len=max_out_tokens)
    longest = llm.engine.state.max_context
    return StaticBatchEngine(llm, max_out_tokens or min(longest, DEFAULT_MAX_OUT_TOKENS))
