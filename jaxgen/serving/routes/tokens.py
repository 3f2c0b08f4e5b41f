"""/tokenize, /detokenize and /tokenizer_info: the model's own vocabulary, in its peers' forms."""

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.serving.bodies import validated
from jaxgen.serving.chat_request import render
from jaxgen.serving.connection import JSONAnswer
from jaxgen.serving.context import Serving
from jaxgen.serving.errors import bad_request
from jaxgen.serving.prompts import off_loop, read_prompt
from jaxgen.serving.protocol.chat import ChatRequest
from jaxgen.serving.protocol.service import DetokenizeRequest, TokenizeRequest


async def tokenize(serving: Serving, request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text or of a conversation."""
    serving.check_model(body.model)
    tokenizer = serving.need_tokenizer()
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        ids = []
        if body.prompt:
            prompt = await read_prompt(serving, body.prompt, add_special_tokens=special)
            ids = prompt.ids
    else:
        asked = body.model_dump(exclude_none=True, exclude={"prompt", "return_token_strs"})
        chat = validated(ChatRequest, asked)
        chat.check_supported()
        ids = (await render(serving, chat)).ids
    spelled = [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return JSONAnswer(
        {
            "count": len(ids),
            "max_model_len": serving.engine.max_context,
            "tokens": ids,
            "token_strs": spelled,
        }
    )


async def detokenize(serving: Serving, request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids, special tokens included; texts for lists of them."""
    serving.check_model(body.model)
    tokenizer = serving.need_tokenizer()
    several = [ids for ids in body.tokens if isinstance(ids, list)]
    lists = several or [[token for token in body.tokens if isinstance(token, int)]]
    for ids in lists:
        outside = [token for token in ids if token >= tokenizer.vocab_size]
        if outside:
            last = tokenizer.vocab_size - 1
            raise bad_request(f"token {outside[0]} is outside of 0 to {last}", "tokens")

    def decode() -> list[str]:
        return [tokenizer.decode(ids) for ids in lists]

    texts = await off_loop(decode, sum(len(ids) for ids in lists))
    answer = texts if several else texts[0]
    return JSONAnswer({"prompt": answer, "text": answer})


async def tokenizer_info(serving: Serving, request: Request) -> Response:
    """Special tokens and chat template, by the names of a tokenizer_config.json."""
    tokenizer = serving.need_tokenizer()
    special = tokenizer.special_tokens
    told = {name: special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    template = None
    if tokenizer.chat_template is not None:
        sources = tokenizer.chat_template.sources
        one = list(sources) == ["default"]
        several = [{"name": name, "template": text} for name, text in sources.items()]
        template = sources["default"] if one else several
    size = {"vocab_size": tokenizer.vocab_size, "model_max_length": serving.engine.max_context}
    return JSONAnswer({**told, **special, **size, "chat_template": template})
