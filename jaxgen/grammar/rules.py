"""The rules that a request's parameters ask for, as sources of masks."""

from jaxgen.grammar.matcher import Grammar
from jaxgen.grammar.token_mask import MaskSource
from jaxgen.grammar.word_rules import OnlyListed, banned_words
from jaxgen.sampling import SamplingParams
from jaxgen.text.tokenizer import Tokenizer


def rules_of(
    params: SamplingParams,
    grammar: Grammar | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> list[MaskSource]:
    """Fresh rules for one continuation; none for most requests. grammar: is copied."""
    rules: list[MaskSource] = []
    if grammar is not None:
        rules.append(grammar.copy())
    if params.bad_words:
        rules.append(banned_words(params.bad_words, tokenizer, vocab_size))
    if params.many_allowed:
        rules.append(OnlyListed(params.allowed_token_ids or (), vocab_size))
    return rules
