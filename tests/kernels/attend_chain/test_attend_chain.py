"""Attention with the chain behind it: plain, the Hopper kernel interpreted and lowered, refusals.

The interpreter has no barrier of the whole grid, so that there each stage is a launch; the barrier
itself is checked on the device (tests/kernels/device/attend_chain.py).
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.attend_chain import (
    AttentionOptions,
    attend_chain,
    gpu,
    has_kernel,
    longest_context,
)
from pallas_kernels.layer_chain import ChainWeights, chain_state
from pallas_kernels.layer_chain.gpu_plan import Plan
from pallas_kernels.pages import RaggedRows, abstract_kv_pages
from pallas_kernels.rope_write import Rotation
from tests.kernels.attend_chain.conformance import (
    NORM,
    assert_agrees,
    make,
    wanted,
)
from tests.kernels.ragged_attention.conformance import Case

OPTIONS = {"window": 500, "soft_cap": 2.0, "sinks": True}
PAGED: dict[str, Any] = {"head_dim": 128, "page_size": 64}


def test_reference_is_attention_and_then_the_chain() -> None:
    case = Case(((1, 20), (3, 5), (1, 9)), options={"window": 7})
    arguments, options, inputs = make(case, norms=True, dtype=jnp.float32, model=24, ffn=56)
    got = attend_chain(*arguments, chain_state(), **options)
    assert_agrees(case, inputs, got, wanted(case, inputs, *arguments[1:3]), 1e-4)


@pytest.mark.parametrize(
    ("case", "blocks", "norms"),
    [
        (Case(((1, 600),), heads=8, kv_heads=1, padding_tokens=0, **PAGED), 3, False),
        pytest.param(
            Case(((1, 640),), heads=8, padding_tokens=0, options=OPTIONS, **PAGED),
            *(7, True),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a context in pieces", "options"],
)
def test_interpreted_without_races(
    case: Case, blocks: int, norms: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, options, inputs = make(case, norms=norms, model=1024, ffn=1024)
    got = gpu.run(
        *arguments,
        chain_state(),
        **options,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        plan=Plan(blocks=blocks, columns=128, slots=4, chunks=2),
    )
    assert_agrees(case, inputs, got, wanted(case, inputs, *arguments[1:3]), 1e-2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def _abstract(tokens: int = 1, blocks: int = 128, **change: int) -> tuple[Any, ...]:
    """A Llama-8B layer's arguments."""
    sizes = {"model": 4096, "ffn": 14336, "kv_heads": 8, "group": 4, "head_dim": 128, **change}
    model, ffn, kv_heads, head_dim = (sizes[n] for n in ("model", "ffn", "kv_heads", "head_dim"))
    inner, fused = (kv_heads * places * head_dim for places in (sizes["group"], sizes["group"] + 2))

    def shape(*axes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, dtype)

    weights = ChainWeights(
        out=shape(model, inner),
        mlp_norm=shape(model),
        gate_up=shape(2, ffn, model),
        down=shape(model, ffn),
        next_norm=shape(model),
        qkv=shape(fused, model),
    )
    pages = abstract_kv_pages(
        64, page_size=64, kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.bfloat16, platform="cuda"
    )
    ints = shape(tokens, dtype=jnp.int32)
    table = shape(tokens, blocks, dtype=jnp.int32)
    rows = RaggedRows(ints, ints, ints, table, shape(dtype=jnp.int32))
    angles = shape(tokens, head_dim // 2, dtype=jnp.float32)
    return (
        shape(tokens, fused),
        shape(tokens, model),
        weights,
        pages,
        rows,
        Rotation(angles, angles),
    )


def _served(**change: int) -> bool:
    answers = []

    def ask(fused: Any, x: Any, weights: Any, pages: Any, rows: Any, rotation: Any) -> None:
        options = {"activation": "silu", "attention": AttentionOptions(0.1, rotation)}
        answers.append(has_kernel(fused, x, weights, pages, rows, **options))

    jax.eval_shape(ask, *_abstract(**change))
    return answers == [True]


def test_serves_one_short_row_of_what_the_kernel_knows() -> None:
    assert not _served()  # on the platform of the tests
    with dispatch.lowering_for("cuda"):
        assert _served()
        assert not _served(blocks=256)
        assert not _served(tokens=2, blocks=2)
        assert not _served(head_dim=64)
        assert not _served(model=3584)
        for part in ("ragged_attention", "layer_chain", "attend_chain"):
            with dispatch.using(**{part: "reference"}):
                assert not _served()


def test_tells_the_longest_context() -> None:
    pages = _abstract()[3]
    assert longest_context(pages) is None  # on the platform of the tests
    with dispatch.lowering_for("cuda"):
        longest = longest_context(pages)
        assert longest is not None
        assert _served(blocks=longest // 64)
        assert not _served(blocks=longest // 64 + 1)
        assert longest_context(_abstract(head_dim=64)[3]) is None
        assert longest_context(_abstract(kv_heads=4)[3]) == 2 * longest


@pytest.mark.slow
def test_lowers_for_cuda_to_one_kernel() -> None:
    def step(fused: Any, x: Any, weights: Any, pages: Any, rows: Any, rotation: Any) -> Any:
        options = {**NORM, "attention": AttentionOptions(0.1, rotation)}
        return attend_chain(fused, x, weights, pages, rows, chain_state(), **options)

    with dispatch.lowering_for("cuda"):
        traced = jax.jit(step).trace(*_abstract())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_what_does_not_fit_together_is_refused() -> None:
    arguments, options, _ = make(Case(((1, 20),)), dtype=jnp.float32, model=24, ffn=56)
    fused, residual, weights, pages, rows = arguments
    state = chain_state()
    with pytest.raises(ValueError, match="multiple of 32 columns"):
        attend_chain(fused[:, 1:], residual, weights, pages, rows, state, **options)
    wrong = replace(weights, down=weights.down[:, 1:])
    with pytest.raises(ValueError, match="down must be"):
        attend_chain(fused, residual, wrong, pages, rows, state, **options)
