"""`jaxgen chat`: answers one prompt, or talks on a terminal, streaming as tokens come."""

import argparse
import sys
import time

from jaxgen.commands.compile_clock import CompileClock
from jaxgen.commands.conversation import Conversation
from jaxgen.commands.interrupts import INTERRUPTED, Interrupts
from jaxgen.commands.opening import open_for
from jaxgen.commands.terminal import note, say
from jaxgen.commands.timing import measure
from jaxgen.engine.outputs import CompletionOutput, FinishReason
from jaxgen.llm import LLM
from jaxgen.schedule.verdict import SchedulingError
from jaxgen_checkpoints.errors import RefusedInput

LEAVE = ("/exit", "/quit")


def run(args: argparse.Namespace) -> int:
    """Answers --prompt and leaves; without it talks until /exit or the end of the input."""
    began = time.perf_counter()
    with CompileClock() as clock:
        opened = open_for(args, sequences=1)
        conversation = Conversation(args, opened)
        if args.prompt is not None:
            conversation.ask(args.prompt)  # refused, if at all, before anything is loaded
        voice = Voice(LLM.of(opened), clock, time.perf_counter() - began)
        if args.prompt is None:
            return _talk(conversation, voice)
        whole = voice.answer(conversation)
    if not whole:
        note("interrupted")
    return 0 if whole else INTERRUPTED


class Voice:
    """The loaded model: answers a conversation's last question aloud."""

    def __init__(self, llm: LLM, clock: CompileClock, load_seconds: float) -> None:
        self._llm = llm
        self._clock = clock
        self._load_seconds: float | None = load_seconds  # told with the first answer

    def answer(self, conversation: Conversation) -> bool:
        """Streams the answer, then a line of timings on stderr. False where Ctrl-C stopped it.

        RefusedInput if the model's answer is no text at all.
        """
        began, first, completion = time.perf_counter(), None, CompletionOutput(0)
        shown = 0
        with Interrupts() as interrupts:
            for output in self._llm.stream(conversation.prompt_ids, conversation.params):
                (completion,) = output.outputs
                first = first or time.perf_counter()
                say(completion.text[shown:], end="")
                shown = len(completion.text)
                if interrupts.stopped:
                    break
        ended = time.perf_counter()
        say()
        if completion.finish_reason is FinishReason.ERROR:
            raise RefusedInput(str(completion.error))
        conversation.answered(completion.text)
        timing = measure(
            self._clock,
            began=began,
            first=first or ended,
            ended=ended,
            prompt_tokens=len(conversation.prompt_ids),
            output_tokens=len(completion.token_ids),
            load_seconds=self._load_seconds,
        )
        self._load_seconds = None
        note(timing.line())
        return not interrupts.stopped


def _talk(conversation: Conversation, voice: Voice) -> int:
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
            note("\n(Ctrl-C again leaves)")
            continue
        interrupted = False
        if line in LEAVE:
            return 0
        if line:
            try:
                conversation.ask(line)
                voice.answer(conversation)
            except (RefusedInput, SchedulingError) as error:
                note(f"error: {error}")
