"""Strict reading of a Hugging Face config: every key is handled, ignored by name, or refused.

Silence is how engines give fluent wrong answers, so a key that nobody asked for is an error unless
it is known not to matter for inference, or is switched off.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any, Final

from jaxgen_checkpoints.dim import Dim
from jaxgen_checkpoints.errors import ConfigError

MAX_SIZE: Final = 1 << 24

# Keys that say something about training, the exporting program or generation defaults.
IGNORED: Final = frozenset(
    [
        "_name_or_path",
        "_commit_hash",
        "_num_labels",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "transformers_version",
        "architectures",
        "model_type",
        "auto_map",
        "torch_dtype",
        "dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "classifier_dropout",
        "pretraining_tp",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "suppress_tokens",
        "begin_suppress_tokens",
        "bad_words_ids",
        "prefix",
        "tokenizer_class",
        "task_specific_params",
        "finetuning_task",
        "problem_type",
        "num_labels",
        "id2label",
        "label2id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict_in_generate",
        "torchscript",
        "use_bfloat16",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "num_return_sequences",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "is_decoder",
        "chunk_size_feed_forward",
        "tf_legacy_loss",
        "gradient_checkpointing",
        "model_max_length",
        "max_sequence_length",
        "neftune_noise_alpha",
        "output_past",
        "predict_special_tokens",
        "seed",
        "custom_pipelines",
        "transformers.js_config",
        "unsloth_version",
        "unsloth_fixed",
    ]
)

# Keys that change what is computed in a way no family implements; any "on" value is refused.
_REFUSED_WHEN_ON: Final = (
    "quantization_config",
    "is_encoder_decoder",
    "add_cross_attention",
    "pruned_heads",
    "tie_encoder_decoder",
    "cross_attention_hidden_size",
)

type Json = Any
"""Whatever a JSON value may be."""

_REQUIRED: Final = object()


class HFConfig:
    """One config.json, read key by key; `finish()` refuses whatever was neither read nor
    ignored.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "config.json") -> None:
        self.raw = dict(raw)
        self.where = where
        self._seen: set[str] = set(IGNORED) | set(_REFUSED_WHEN_ON)
        for key in _REFUSED_WHEN_ON:
            value = self.raw.get(key)
            if value:
                raise self._error(f"{key} = {_short(value)} is not supported")

    @property
    def architecture(self) -> str | None:
        """The first entry of `architectures`, if there is one."""
        names = self.raw.get("architectures")
        if names is None:
            return None
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise self._error(f"architectures must be a list of names, got {_short(names)}")
        return names[0]

    @property
    def model_type(self) -> str | None:
        """The `model_type` of the config, if there is one."""
        return self.raw.get("model_type")

    def spelling(self, *keys: str) -> str:
        """The one of a setting's names that this config uses; the first where it uses none.

        Several that say the same are taken for one; several that differ are refused.
        """
        given = [key for key in keys if self.raw.get(key) is not None]
        for key in given[1:]:
            if self.raw[key] != self.raw[given[0]]:
                raise self._error(
                    f"{given[0]} = {_short(self.raw[given[0]])} and {key} = "
                    f"{_short(self.raw[key])} are two names of one setting and differ"
                )
        self._seen.update(keys)
        return given[0] if given else keys[0]

    def size(self, key: str, default: Json = _REQUIRED) -> Dim:
        """A positive integer, remembered with its name for messages about shapes."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(f"{key} must be an integer, got {_kind(value)} {_short(value)}")
        if value <= 0:
            raise self._error(f"{key} must be a positive integer, got {value}")
        if value > MAX_SIZE:
            raise self._error(f"{key} = {value} is larger than any model ({MAX_SIZE} at most)")
        return value if isinstance(value, Dim) else Dim(value, key)

    def optional_size(self, key: str, absent: int | None = None) -> Dim | None:
        """As `size`, where null means "not set" and an absent key means `absent`."""
        self._seen.add(key)
        if key not in self.raw:
            return None if absent is None else Dim(absent, key)
        return None if self.raw[key] is None else self.size(key)

    def number(self, key: str, default: Json = _REQUIRED) -> float:
        """A finite number greater than zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(f"{key} must be a number, got {_kind(value)} {_short(value)}")
        if not math.isfinite(value) or value <= 0:
            raise self._error(f"{key} must be finite and above zero, got {value}")
        return float(value)

    def optional_number(self, key: str, absent: float | None = None) -> float | None:
        """As `number`, where null means "not set" and an absent key means `absent`."""
        self._seen.add(key)
        if key not in self.raw:
            return absent
        return None if self.raw[key] is None else self.number(key)

    def flag(self, key: str, default: Json = _REQUIRED) -> bool:
        """true or false; null is false, and refused where an absent key means true."""
        value = self._get(key, default)
        if key in self.raw and self.raw[key] is None and default is True:
            raise self._error(f"{key} is null, and true where it is left out; say which")
        if not isinstance(value, bool):
            raise self._error(f"{key} must be true or false, got {_kind(value)} {_short(value)}")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: Json = _REQUIRED) -> str:
        """One of a fixed set of names."""
        value = self._get(key, default)
        if value not in choices:
            raise self._error(
                f"{key} = {_short(value)} is not known; supported: {', '.join(choices)}"
            )
        return value

    def table(self, key: str) -> dict[str, Any] | None:
        """A nested object, or None where it is absent or null."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, dict):
            raise self._error(f"{key} must be an object, got {_kind(value)} {_short(value)}")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list, or None where it is absent or null."""
        value = self._get(key, None)
        if value is not None and not isinstance(value, list):
            raise self._error(f"{key} must be a list, got {_kind(value)} {_short(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one integer, a list of integers or null."""
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._error(f"{key} must be token ids, got {_short(value)}")
        return tuple(ids)

    def ignore(self, *keys: str) -> None:
        """Names keys that this family knows and that do not change what is computed."""
        self._seen.update(keys)

    def finish(self, family: str) -> None:
        """Refuses keys that nothing has read, unless they are switched off."""
        unread = sorted(
            key
            for key, value in self.raw.items()
            if key not in self._seen and value not in (None, False) and value != {} and value != []
        )
        if unread:
            hints = [self._hint(key) for key in unread]
            raise self._error(
                f"the {family} family does not implement {', '.join(hints)}; "
                "an option that is not implemented is refused rather than ignored"
            )

    def error(self, message: str) -> ConfigError:
        """A ConfigError that says which file it is about."""
        return self._error(message)

    def _get(self, key: str, default: Json) -> Json:
        self._seen.add(key)
        if key in self.raw and not (self.raw[key] is None and default is not _REQUIRED):
            return self.raw[key]
        if default is _REQUIRED:
            raise self._error(f"{key} is missing")
        return default

    def _hint(self, key: str) -> str:
        near = difflib.get_close_matches(key, self._seen, n=1, cutoff=0.85)
        return f"{key} (did you mean {near[0]}?)" if near else key

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.where}: {message}")


def _short(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Json) -> str:
    return {str: "the string", bool: "the boolean", float: "the number", type(None): "null"}.get(
        type(value), f"a {type(value).__name__}"
    )
