"""The rules that a request's parameters ask for, as sources of masks."""

from collections.abc import Sequence

from jaxgen.grammar.compiler import GrammarCompiler
from jaxgen.grammar.token_mask import MaskSource
from jaxgen.grammar.word_rules import OnlyListed, banned_words
from jaxgen.sampling import SamplingParams
from jaxgen.text.tokenizer import Tokenizer


class RuleCompiler:
    """Compiles for one tokenizer. May be called from any thread, and takes its time.

    eos_ids: what may end the text where a grammar is satisfied.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_ids)

    def compile(self, params: SamplingParams) -> list[MaskSource]:
        """The rules of a request, none for most; each continuation takes a copy.

        InvalidParameter for what means nothing, is too hard, or is outside of the vocabulary.
        """
        params.validate(self._vocab_size)
        rules: list[MaskSource] = []
        if params.structured_outputs is not None:
            rules.append(self._grammars.compile(params.structured_outputs))
        if params.bad_words:
            rules.append(banned_words(params.bad_words, self._tokenizer, self._vocab_size))
        if params.many_allowed:
            rules.append(OnlyListed(params.allowed_token_ids or (), self._vocab_size))
        return rules
