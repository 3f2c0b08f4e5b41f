"""`jaxgen chat`: answers one prompt, or talks on a terminal, streaming as tokens come."""

import argparse
import sys
import time
from collections.abc import Sequence

from jaxgen.commands.compile_clock import CompileClock
from jaxgen.commands.interrupts import Interrupts
from jaxgen.commands.opening import open_llm
from jaxgen.commands.sampling_options import sampling_params
from jaxgen.commands.terminal import note, say
from jaxgen.commands.timing import measure
from jaxgen.engine.outputs import FinishReason
from jaxgen.llm import LLM
from jaxgen.text.chat_template import ChatTemplateError
from jaxgen_checkpoints.errors import RefusedInput

USUAL_TOKENS = 512
"""Tokens of an answer where --max-tokens is not given."""

LEAVE = ("/exit", "/quit")


def run(args: argparse.Namespace) -> int:
    """Answers --prompt and leaves; without it talks until /exit or the end of the input."""
    began = time.perf_counter()
    with CompileClock() as clock:
        llm = open_llm(args, sequences=1)
        conversation = Conversation(args, llm, clock, time.perf_counter() - began)
        if args.prompt is not None:
            conversation.answer(args.prompt)
            return 0
        return _talk(conversation)


class Conversation:
    """The messages so far, and how the next one is answered."""

    def __init__(
        self, args: argparse.Namespace, llm: LLM, clock: CompileClock, load_seconds: float
    ) -> None:
        llm.need_tokenizer()
        self._args = args
        self._llm = llm
        self._clock = clock
        self._load_seconds: float | None = load_seconds  # told with the first answer
        self._messages: list[dict[str, str]] = []
        if args.system is not None:
            self._messages.append({"role": "system", "content": args.system})

    def answer(self, text: str) -> None:
        """Streams the answer to `text`, then a line of timings on stderr.

        A message that is refused is forgotten, so that the conversation can go on.
        """
        self._messages.append({"role": "user", "content": text})
        try:
            said = self._stream(self._encode())
        except (RefusedInput, RuntimeError):
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": said})

    def _encode(self) -> Sequence[int]:
        try:
            return self._llm.need_tokenizer().encode_chat(self._messages)
        except ChatTemplateError as error:
            raise RefusedInput(f"{self._args.model}: chat_template: {error}") from error

    def _stream(self, ids: Sequence[int]) -> str:
        params = sampling_params(
            self._args, self._llm, prompt_tokens=len(ids), usual_tokens=USUAL_TOKENS
        )
        began = time.perf_counter()
        first, shown, tokens = None, 0, 0
        with Interrupts() as interrupts:
            for output in self._llm.stream(ids, params):
                (completion,) = output.outputs
                first = first or time.perf_counter()
                tokens = len(completion.token_ids)
                say(completion.text[shown:], end="")
                shown = len(completion.text)
                if interrupts.stopped:
                    break
        say()
        ended = time.perf_counter()
        if completion.finish_reason is FinishReason.ERROR:
            raise RefusedInput(f"{self._args.model}: {completion.error}")
        timing = measure(
            self._clock,
            began=began,
            first=first or ended,
            ended=ended,
            prompt_tokens=len(ids),
            output_tokens=tokens,
            load_seconds=self._load_seconds,
        )
        self._load_seconds = None
        note(timing.line())
        return completion.text


def _talk(conversation: Conversation) -> int:
    """The loop of an interactive chat; Ctrl-C twice at its prompt leaves with 130."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 (line editing and history for input())

        note("(/exit or Ctrl-D leaves, Ctrl-C stops an answer)")
    interrupted = False
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            if interrupted or not terminal:
                raise
            interrupted = True
            note("(Ctrl-C again leaves)")
            continue
        interrupted = False
        if line in LEAVE:
            return 0
        if line:
            try:
                conversation.answer(line)
            except RefusedInput as error:
                note(f"error: {error}")
