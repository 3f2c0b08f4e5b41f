"""DeepSpeed-MII's front door without a server: a pipeline that lives as long as your process.

Keyword names and defaults are MII's, the engine underneath is the one that serves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from jaxgen.config import EngineConfig
from jaxgen.engine.build import PolicyName
from jaxgen.engine.outputs import RequestOutput
from jaxgen.llm import LLM
from jaxgen.sampling import InvalidParameter, SamplingParams


@dataclass(frozen=True, slots=True)
class Response:
    """One answer. finish_reason: "stop", "length" or "error"; lengths are in tokens."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str

    def __str__(self) -> str:
        """The text alone."""
        return self.generated_text


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParams:
    """MII's generation parameters; InvalidParameter names the one that is wrong.

    max_length counts prompt and answer together, max_new_tokens the answer alone; without either
    the answer may fill the context. do_sample=False is greedy.
    """

    max_length: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    return_full_text: bool = False
    do_sample: bool = True
    top_p: float = 0.9
    top_k: int | None = None
    temperature: float | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("do_sample", "return_full_text"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidParameter(name, f"must be true or false, not {value!r}")

    def sampling(self, prompt_length: int) -> SamplingParams:
        """What the sampler is asked for a prompt of this many tokens."""
        temperature = 1.0 if self.temperature is None else self.temperature
        asked: dict[str, Any] = {
            "temperature": temperature if self.do_sample else 0.0,
            "top_p": self.top_p if self.do_sample else 1.0,
            "top_k": self.top_k or 0,
            "max_tokens": self._new_tokens(prompt_length),
            "min_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop,
            "seed": self.seed,
        }
        try:
            return SamplingParams(**asked)
        except InvalidParameter as error:
            names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
            raise error.under(names) from None

    def _new_tokens(self, prompt_length: int) -> int | None:
        if self.max_length is None:
            return self.max_new_tokens
        if not isinstance(self.max_length, int) or isinstance(self.max_length, bool):
            raise InvalidParameter("max_length", f"must be an integer, not {self.max_length!r}")
        room = self.max_length - prompt_length
        if room < 1:
            raise InvalidParameter(
                "max_length",
                f"is {self.max_length}, but the prompt alone has {prompt_length} tokens",
            )
        if not isinstance(self.max_new_tokens, int):
            return room if self.max_new_tokens is None else self.max_new_tokens
        return min(room, self.max_new_tokens)


class Pipeline:
    """`pipe(prompts, **params)` gives one Response a prompt, in order. See `pipeline`."""

    def __init__(self, llm: LLM) -> None:
        self._llm: LLM | None = llm

    def __call__(
        self,
        prompts: str | Sequence[str],
        **params: Any,  # noqa: ANN401 (GenerateParams, checked by name)
    ) -> list[Response]:
        """Answers every prompt. params: see GenerateParams."""
        if self._llm is None:
            raise RuntimeError("this pipeline was destroyed; make a new one")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        asked = read_params(params)
        tokenizer = self._llm.need_tokenizer()
        ids = [tokenizer.encode(text) for text in texts]
        outputs = self._llm.generate(ids, [asked.sampling(len(prompt)) for prompt in ids])
        return [
            _response(output, text if asked.return_full_text else "")
            for output, text in zip(outputs, texts, strict=True)
        ]

    def destroy(self) -> None:
        """Lets go of weights and cache; any later call is refused."""
        self._llm = None

    def __enter__(self) -> Self:
        """The pipeline itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Destroys it."""
        self.destroy()


def pipeline(
    model: str | Path,
    engine_config: EngineConfig | Mapping[str, Any] | None = None,
    *,
    tensor_parallel: int | None = None,
    policy: PolicyName = None,
    **options: Any,  # noqa: ANN401 (the engine's own options, checked by name)
) -> Pipeline:
    """A pipeline over a checkpoint folder, a .gguf file or a snapshot.

    Example: `pipeline("path/to/model")(["Hello, my name is"], max_new_tokens=20)`.
    """
    llm = LLM(model, engine_config, policy=policy, tensor_parallel_size=tensor_parallel, **options)
    return Pipeline(llm)


def read_params(given: Mapping[str, Any]) -> GenerateParams:
    """The parameters that a user named; InvalidParameter for a name that there is not."""
    known = GenerateParams.__dataclass_fields__
    for name in given:
        if name not in known:
            raise InvalidParameter(
                name, f"is not a parameter of pipelines; known: {', '.join(known)}"
            )
    return GenerateParams(**given)


def _response(output: RequestOutput, prefix: str) -> Response:
    (completion,) = output.outputs
    return Response(
        generated_text=prefix + completion.text,
        prompt_length=len(output.prompt_token_ids),
        generated_length=len(completion.token_ids),
        finish_reason=str(completion.finish_reason),
    )
