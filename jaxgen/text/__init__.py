"""Text: tokenizers from any checkpoint, chat templates, and text that grows token by token."""

from jaxgen.text.chat_template import ChatTemplate, ChatTemplateError
from jaxgen.text.detokenize import IncrementalDetokenizer
from jaxgen.text.gguf_tokenizer import gguf_tokenizer
from jaxgen.text.loading import load_tokenizer
from jaxgen.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "Tokenizer",
    "gguf_tokenizer",
    "load_tokenizer",
]
