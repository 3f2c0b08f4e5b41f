"""Which shapes are measured: on accelerators those of well-known models, on CPUs toys of them."""

from collections.abc import Sequence

from jaxgen.bench.kernels.attention import Heads, LatentHeads, attention_case, latent_case
from jaxgen.bench.kernels.case import Case
from jaxgen.bench.kernels.weights import (
    Experts,
    Layer,
    chain_case,
    experts_case,
    products_case,
)

_LLAMA = Heads(heads=32, kv_heads=8, dim=128, page=64)
_LLAMA_LAYER = Layer(model=4096, ffn=14336, fused=6144, layers=16)
_UNEVEN = (1500, 300, 1100, 700, 1024, 200, 1272, 500)
_ATTENTION = {
    "decode 64 x 4096": [(1, 4096)] * 64,
    "decode 1 x 131072": [(1, 131072)],
    "decode 128 x 1024": [(1, 1024)] * 128,
    "decode 256 x 1024": [(1, 1024)] * 256,
    "prefill 1 x 8192": [(8192, 8192)],
    "prefill 8 x 1024": [(1024, 1024)] * 8,
    "prefill 8 uneven": [(length, length) for length in _UNEVEN],
}
_LATENT = {(16, 128): 4096, (16, 256): 1024, (128, 128): 4096}
_EXPERTS = {
    "DeepSeek-V2-Lite": Experts(64, 6, 2048, 1408, shared=2816),
    "Qwen3-30B-A3B": Experts(128, 8, 2048, 768),
}
_CHECKED_DECODE = [(1, 70), (1, 1), (1, 300), (1, 64), (1, 2500)]
_CHECKED_PREFILL = [(70, 70), (1, 1), (60, 500), (64, 64), (33, 1300)]


def cases(platform: str) -> Sequence[Case]:
    """All of them. platform: of JAX; "cpu" is given toys."""
    return _toys() if platform == "cpu" else _models()


def _models() -> list[Case]:
    found = []
    for name, lengths in _ATTENTION.items():
        checked = _CHECKED_DECODE if name.startswith("decode") else _CHECKED_PREFILL
        found.append(attention_case(f"32/8 heads, {name}", _LLAMA, lengths, checked, calls=8))
    for (heads, rows), context in _LATENT.items():
        shape = LatentHeads(heads, 512, 576, page=64, scale=192**-0.5)
        name = f"{heads} heads, decode {rows} x {context}"
        found.append(latent_case(name, shape, [(1, context)] * rows, _CHECKED_DECODE, calls=8))
    for rows in (1, 64, 256):
        found.append(products_case(f"Llama-8B, {rows} rows", _LLAMA_LAYER, rows))
    for rows in (1, 8, 64):
        found.append(chain_case(f"Llama-8B, {rows} rows", _LLAMA_LAYER, rows))
    for model, experts in _EXPERTS.items():
        for tokens in (1, 64, 256):
            found.append(experts_case(f"{model}, {tokens} tokens", experts, tokens, calls=8))
    return found


def _toys() -> list[Case]:
    heads = Heads(heads=4, kv_heads=2, dim=16, page=8)
    latents = LatentHeads(heads=4, latent=32, width=40, page=8, scale=0.2)
    layer = Layer(model=32, ffn=64, fused=48, layers=2)
    decode, prefill = [(1, 40), (1, 9)], [(12, 20), (7, 7)]
    return [
        attention_case("toy, decode", heads, decode, decode, calls=1),
        attention_case("toy, prefill", heads, prefill, prefill, calls=1),
        latent_case("toy, decode", latents, decode, decode, calls=1),
        products_case("toy, 3 rows", layer, 3),
        chain_case("toy, 3 rows", layer, 3),
        experts_case("toy, 5 tokens", Experts(8, 2, 32, 24, shared=24), 5, calls=1),
    ]
