"""What a request may ask of the sampler: vLLM's names, defaults and ranges, checked once."""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeGuard

import numpy as np

from jaxgen.sampling.invalid import InvalidParameter
from jaxgen.sampling.structured import StructuredOutputs

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy decoding."""

LOWEST_TEMPERATURE = 0.01
"""Positive temperatures are raised to this: below it float32 logits overflow when divided."""

LARGEST_FACTOR = 1e9
"""Bounds repetition_penalty, and its inverse: what the device's float32 can divide and multiply by.
"""

SMALLEST_MASS = float(np.finfo(np.float32).tiny)
"""A smaller top_p is raised to this: the device would take it for 0, which no token reaches."""

MAX_LOGPROBS = 20
MAX_N = 16384
MAX_BIASED_IDS = 320
"""How many token ids of one request may carry a bias, or be held back by min_tokens."""

MAX_TEXTS = 256
"""How many stop strings, or bad words, a request may have: all are looked for at every token."""

LONGEST_TEXT = 4096
"""Characters of each of them."""

_NOT_YET = {
    "logprob_token_ids": "ask for logprobs instead",
    "thinking_token_budget": "bound the answer with max_tokens instead",
    "repetition_detection": "use frequency_penalty instead",
    "extra_args": "no plug-in reads them",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it stops. Raises InvalidParameter naming the parameter.

    `temperature` 0 is greedy. `top_k` 0 or -1 switches it off. `seed` None lets the engine choose.
    `max_tokens` None fills the context. `logprobs` k also returns the k most likely tokens.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    logprob_token_ids: None = None
    thinking_token_budget: None = None
    repetition_detection: None = None
    extra_args: None = None

    def __post_init__(self) -> None:
        for name, instead in _NOT_YET.items():
            if getattr(self, name) not in (None, [], (), {}):
                raise InvalidParameter(name, f"is not supported yet; {instead}")
        self._check_numbers()
        self._check_flags()
        self._check_lists()
        self._settle_temperature()
        self._check_together()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The parameters named in `values` (a request's body); unknown names are refused."""
        known = {entry.name for entry in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidParameter(name, f"is not a sampling parameter; known: {sorted(known)}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def many_allowed(self) -> bool:
        """Whether allowed_token_ids are too many for the short list of a slot."""
        return len(self.allowed_token_ids or ()) > MAX_BIASED_IDS

    @property
    def masked(self) -> bool:
        """Whether each token is drawn from a set that the host computes."""
        return bool(self.structured_outputs or self.bad_words or self.many_allowed)

    @property
    def penalised(self) -> bool:
        """Whether the tokens seen so far change the next one's odds."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    def validate(self, vocab_size: int) -> None:
        """Refuse token ids outside `vocab_size`: the device would silently clamp them."""
        listed: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, ids in listed.items():
            outside = [token for token in ids if not 0 <= token < vocab_size]
            if outside:
                message = f"names token ids outside the vocabulary of {vocab_size}: {outside[:8]}"
                raise InvalidParameter(name, message)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        self._integer("n", 1, MAX_N)
        self._real("presence_penalty", -2, 2)
        self._real("frequency_penalty", -2, 2)
        self._real("repetition_penalty", 1 / LARGEST_FACTOR, LARGEST_FACTOR)
        self._real("temperature", 0, 2)
        self._real("top_p", 0, 1, low_open=True)
        self._set("top_p", max(self.top_p, SMALLEST_MASS))
        self._integer("top_k", -1, 2**31 - 1)
        self._real("min_p", 0, 1)
        self._integer("seed", -(2**63), 2**63 - 1, optional=True)
        self._integer("max_tokens", 1, 2**31 - 1, optional=True)
        self._integer("min_tokens", 0, 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                self._set(name, 1 if getattr(self, name) else None)
            self._integer(name, 0, MAX_LOGPROBS, optional=True)
        if self.seed == -1:
            self._set("seed", None)
        if self.top_k == -1:
            self._set("top_k", 0)

    def _check_flags(self) -> None:
        flags = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"must be true or false, not {getattr(self, name)!r}")
        if self.spaces_between_special_tokens is not True:
            raise InvalidParameter("spaces_between_special_tokens", "false is not supported yet")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            self._set(name, _texts(name, getattr(self, name)))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidParameter("allowed_token_ids", "must hold at least one token id")
            self._set("allowed_token_ids", allowed)
        self._set("logit_bias", _biases(self.logit_bias or {}))
        wanted = self.structured_outputs
        if isinstance(wanted, Mapping):
            self._set("structured_outputs", StructuredOutputs.from_mapping(wanted))
        elif wanted is not None and not isinstance(wanted, StructuredOutputs):
            raise InvalidParameter("structured_outputs", f"must be an object, not {wanted!r}")

    def _settle_temperature(self) -> None:
        if self.temperature < GREEDY_BELOW:
            for name, value in {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}.items():
                self._set(name, value)
        elif self.temperature < LOWEST_TEMPERATURE:
            warnings.warn(
                f"temperature {self.temperature} is raised to {LOWEST_TEMPERATURE}; 0 is greedy",
                stacklevel=4,
            )
            self._set("temperature", LOWEST_TEMPERATURE)

    def _check_together(self) -> None:
        if self.greedy and self.n > 1:
            raise InvalidParameter("n", f"must be 1 when sampling greedily, not {self.n}")
        if self.stop and not self.detokenize:
            raise InvalidParameter("stop", "strings need detokenize=True; use stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            raise InvalidParameter("min_tokens", message)

    def _integer(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_whole(value) or not low <= value <= high:
            raise InvalidParameter(name, f"must be an integer from {low} to {high}, not {value!r}")
        self._set(name, int(value))

    def _real(self, name: str, low: float, high: float, *, low_open: bool = False) -> None:
        value = getattr(self, name)
        number = _is_whole(value) or isinstance(value, float | np.floating)
        if not number or not low <= value <= high or (low_open and value == low):
            bracket = "(" if low_open else "["
            message = f"must be a number in {bracket}{low}, {high}], not {value!r}"
            raise InvalidParameter(name, message)
        self._set(name, float(value))


def _texts(name: str, value: object) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str | Mapping) else value or ()
    texts = tuple(listed) if isinstance(listed, Iterable) else (listed,)
    if len(texts) > MAX_TEXTS:
        raise InvalidParameter(name, f"must be at most {MAX_TEXTS} strings, not {len(texts)}")
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidParameter(name, f"must be non-empty strings, not {value!r}")
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > LONGEST_TEXT:
        message = f"must be strings of at most {LONGEST_TEXT} characters, not {longest}"
        raise InvalidParameter(name, message)
    return tuple(text for text in texts if isinstance(text, str))


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    given = tuple(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else (ids,)
    if not all(_is_whole(token) for token in given):
        raise InvalidParameter(name, f"must be a list of token ids, not {ids!r}")
    return tuple(dict.fromkeys(int(token) for token in given if _is_whole(token)))


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise InvalidParameter("logit_bias", f"must map token ids to numbers, not {given!r}")
    biases = {}
    for key, value in given.items():
        try:
            token, bias = int(str(key)), float(value)
        except (TypeError, ValueError, OverflowError):
            message = f"must map token ids to numbers; {key!r}: {value!r:.40} does not"
            raise InvalidParameter("logit_bias", message) from None
        if not math.isfinite(bias):
            raise InvalidParameter("logit_bias", f"of token {token} must be finite, not {bias}")
        biases[token] = min(100.0, max(-100.0, bias))
    if len(biases) > MAX_BIASED_IDS:
        message = f"must name at most {MAX_BIASED_IDS} token ids, not {len(biases)}"
        raise InvalidParameter("logit_bias", message)
    return biases
