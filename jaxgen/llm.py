"""A model that takes and gives text: an engine, its tokenizer and a generation loop together."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxgen.config import EngineConfig
from jaxgen.engine.build import PolicyName, build_engine
from jaxgen.engine.engine import InferenceEngine
from jaxgen.engine.loop import GenerationLoop
from jaxgen.engine.outputs import RequestOutput
from jaxgen.opened import OpenedModel, open_model
from jaxgen.prompts import PlainPrompt, Prompt, as_batch, plain_prompt
from jaxgen.sampling import SamplingParams
from jaxgen.schedule.order import longest_first
from jaxgen.text.tokenizer import Tokenizer
from jaxgen_checkpoints.errors import RefusedInput


class LLM:
    """Offline generation, batched continuously.

    Attributes (to be read): engine, tokenizer (None where the checkpoint has none), eos_ids.
    """

    def __init__(
        self,
        model: str | Path,
        engine_config: EngineConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
        policy: PolicyName = None,
        **options: Any,  # noqa: ANN401 (the engine's own options, checked by name)
    ) -> None:
        """model: a checkpoint folder, a .gguf file or a snapshot of ours.

        engine_config and options: as EngineConfig.from_any takes them. tokenizer: a folder to take
        it from instead. chat_template: its text, instead of the checkpoint's. RefusedInput for
        whatever cannot be served, before anything is placed on a device.
        """
        config = EngineConfig.from_any(engine_config, **options)
        self._load(
            open_model(
                model, config, tokenizer=tokenizer, chat_template=chat_template, policy=policy
            )
        )

    @classmethod
    def of(cls, opened: OpenedModel, *, compile_ahead: bool = False) -> Self:
        """The LLM of a model that is open already: now its weights are loaded.

        compile_ahead: meanwhile its steps are compiled, for a `warm_up` to come.
        """
        llm = cls.__new__(cls)
        llm._load(opened, compile_ahead=compile_ahead)
        return llm

    def _load(self, opened: OpenedModel, *, compile_ahead: bool = False) -> None:
        config = opened.config
        self._opened = opened
        self.tokenizer: Tokenizer | None = opened.tokenizer
        self.eos_ids: tuple[int, ...] = opened.eos_ids
        self.engine: InferenceEngine = build_engine(
            opened.described, config, load_format=opened.load_format, compile_ahead=compile_ahead
        )
        self._loop = GenerationLoop(
            self.engine,
            self.tokenizer,
            eos_ids=self.eos_ids,
            overlap=not config.enforce_eager,
        )
        self._next_id = 0
        self._handed_over = False

    def warm_up(self) -> None:
        """Compiles every step before the first request, so that none waits for a compiler."""
        self.engine.warm_up()

    def hand_over(self) -> GenerationLoop:
        """The loop, for a server that drives it from its own thread; then nobody else may.

        RuntimeError where that has happened already.
        """
        loop, self._handed_over = self._own_loop(), True
        return loop

    def _own_loop(self) -> GenerationLoop:
        if self._handed_over:
            raise RuntimeError("the engine is in the hands of a server: ask that one instead")
        return self._loop

    def default_sampling_params(self, **changes: Any) -> SamplingParams:  # noqa: ANN401
        """What the checkpoint's generation_config asks for, with changes by name."""
        return self._opened.default_sampling_params(**changes)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. Sampling params for all, or one for each.

        Long answers (by max_tokens) begin first: the last ones to end are then many, not few. In
        that order those that bring no seed are given one, by the engine's own.

        A prompt is text, token ids, or vLLM's object around either. Raises before anything is
        computed for a request that can never be served.
        """
        batch = as_batch(prompts)
        params = self._params_for(batch, sampling_params)
        outputs = self._submit(batch, params)
        try:
            for output in outputs:
                while not output.finished:
                    self._loop.step()
        finally:  # an interrupt leaves nothing behind
            for output in outputs:
                self._loop.abort(output.request_id)
        return outputs

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The growing output of one prompt, whenever it has got longer; aborted when left early.

        Streams that are read in turns share the engine's steps.
        """
        batch = [plain_prompt(prompt)]
        (output,) = self._submit(batch, self._params_for(batch, sampling_params))
        told = 0
        try:
            while not output.finished or told < _length(output):
                if told < _length(output):
                    told = _length(output)
                    yield output
                else:
                    self._loop.step()
        finally:
            self._loop.abort(output.request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,  # noqa: ANN401 (what the checkpoint's template takes)
    ) -> RequestOutput:
        """The answer to a conversation of {"role", "content"} messages."""
        ids = self.need_tokenizer().encode_chat(messages, **template_options)
        return self.generate([ids], sampling_params)[0]

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; RefusedInput where the checkpoint has none."""
        return self._opened.need_tokenizer()

    def _params_for(
        self,
        batch: Sequence[PlainPrompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_sampling_params()] * len(batch)
        if len(given) != len(batch):
            raise RefusedInput(f"{len(batch)} prompts were given {len(given)} sampling params")
        return list(given)

    def _submit(
        self, batch: Sequence[PlainPrompt], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """Queues all prompts, or none, those that may be answered at the greatest length first."""
        loop, outputs = self._own_loop(), dict[int, RequestOutput]()
        first, self._next_id = self._next_id, self._next_id + len(batch)
        try:
            for index in longest_first([asked.max_tokens for asked in params]):
                prompt, asked, name = batch[index], params[index], str(first + index)
                text = prompt if isinstance(prompt, str) else None
                ids = self.need_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
                outputs[index] = loop.submit(name, ids, asked, prompt=text)
        except BaseException:  # an interrupt too leaves nothing behind
            for output in outputs.values():
                loop.abort(output.request_id)
            raise
        return [outputs[index] for index in range(len(batch))]


def _length(output: RequestOutput) -> int:
    """Tokens of all its continuations, and how many of them have ended."""
    return sum(len(c.token_ids) + (c.finish_reason is not None) for c in output.outputs)
