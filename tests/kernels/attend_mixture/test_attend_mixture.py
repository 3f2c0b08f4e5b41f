"""Attention with the mixture chain behind it: plain, the Hopper kernel interpreted and lowered,
refusals.

The interpreter has no barrier of the whole grid, so that there each phase is a launch; the barriers
and words themselves are checked on the device (tests/kernels/device/mixture_chain.py).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.attend_mixture import AttentionOptions, attend_mixture, gpu, has_kernel
from pallas_kernels.expert_mlp.choice import ChoiceProblem
from pallas_kernels.layer_chain.gpu_plan import Plan
from pallas_kernels.mixture_chain import MixtureWeights, mixture_state
from pallas_kernels.pages import RaggedRows, abstract_kv_pages
from pallas_kernels.rope_write import HeadNorms, Rotation
from tests.kernels.attend_mixture.conformance import OPTIONS, assert_agrees, make, wanted
from tests.kernels.mixture_chain.conformance import choice
from tests.kernels.ragged_attention.conformance import Case

PAGED: dict[str, Any] = {"head_dim": 128, "page_size": 64, "padding_tokens": 0}


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_reference_is_attention_and_then_the_chain(length: int) -> None:
    case = Case(((1, length),), padding_tokens=0, options={"window": 7, "sinks": True})
    problem = choice(8)
    arguments, options, inputs = make(
        case, problem, norms=True, dtype=jnp.float32, model=48, ffn=24, shared=48
    )
    got = jax.jit(partial(attend_mixture, **options))(*arguments)
    assert_agrees(got, wanted(case, inputs, *arguments[1:3], problem), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "blocks", "problem", "sizes"),
    [
        # Its own token alone; two of seven blocks of threads attend.
        (Case(((1, 1),), heads=8, **PAGED), 7, choice(), {"shared": 128}),
        # One piece of a head, the last block in part; the last layer.
        (Case(((1, 250),), heads=8, kv_heads=1, **PAGED), 3, choice(), {"fused": None}),
        # Pieces, unevenly cut.
        (Case(((1, 600),), heads=8, kv_heads=1, **PAGED), 3, choice(128, 8), {}),
        (
            Case(
                ((1, 640),),
                heads=8,
                options={"window": 500, "soft_cap": 2.0, "sinks": True},
                **PAGED,
            ),
            *(7, choice(normalise=False), {}),
        ),
        # A page is full; the heads of Qwen3-30B-A3B.
        (Case(((1, 64),), heads=32, kv_heads=4, **PAGED), 9, choice(), {}),
        # A context whose token begins a page.
        (Case(((1, 385),), heads=32, kv_heads=4, **PAGED), 13, choice(), {}),
    ],
    ids=["1", "250, last layer", "600 in 3", "640 in 3, options", "32/4, 64", "32/4, 385"],
)
def test_interpreted_without_races(
    case: Case,
    blocks: int,
    problem: ChoiceProblem,
    sizes: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    sizes = {"model": 1024, "ffn": 128, **sizes}
    arguments, options, inputs = make(case, problem, norms=True, **sizes)
    chunks = max(case.heads * 128 // 1024, 1)
    got = gpu.run(
        *arguments,
        **options,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
        plan=Plan(blocks=blocks, columns=128, slots=4, chunks=chunks),
    )
    assert_agrees(got, wanted(case, inputs, *arguments[1:3], problem), 1e-2)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())  # jax 0.11 prints, 0.12 raises


def _abstract(blocks: int = 256, **change: int) -> tuple[tuple[Any, ...], ChoiceProblem]:
    """A layer of Qwen3-30B-A3B's shape, and how its tokens choose."""
    sizes = {"model": 2048, "ffn": 768, "kv_heads": 4, "group": 8, "head_dim": 128, **change}
    model, ffn, kv_heads, head_dim = (sizes[n] for n in ("model", "ffn", "kv_heads", "head_dim"))
    inner, fused = (kv_heads * places * head_dim for places in (sizes["group"], sizes["group"] + 2))
    problem = choice(128, 8)

    def shape(*axes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, dtype)

    weights = MixtureWeights(
        out=shape(model, inner),
        mlp_norm=shape(model),
        router=shape(128, model),
        gate_up=shape(128, 2, ffn, model),
        down=shape(128, model, ffn),
        next_norm=shape(model),
        following=shape(fused, model),
    )
    pages = abstract_kv_pages(
        64, page_size=64, kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.bfloat16, platform="cuda"
    )
    ints = shape(1, dtype=jnp.int32)
    rows = RaggedRows(ints, ints, ints, shape(1, blocks, dtype=jnp.int32), shape(dtype=jnp.int32))
    angles = shape(1, head_dim // 2, dtype=jnp.float32)
    turning = Rotation(angles, angles), HeadNorms(shape(head_dim), shape(head_dim), eps=1e-6)
    return (shape(1, fused), shape(1, model), weights, pages, rows, *turning), problem


def _served(**change: int) -> bool:
    answers, (arguments, problem) = [], _abstract(**change)

    def ask(
        fused: Any, x: Any, weights: Any, pages: Any, rows: Any, rotation: Any, norms: Any
    ) -> None:
        attention = AttentionOptions(0.1, rotation, norms)
        options = {"activation": "silu", "choice": problem, "attention": attention}
        answers.append(has_kernel(fused, x, weights, pages, rows, **options))

    jax.eval_shape(ask, *arguments)
    return answers == [True]


def test_serves_one_short_row_of_what_the_kernel_knows() -> None:
    assert not _served()  # on the platform of the tests
    with dispatch.lowering_for("cuda"):
        assert _served()
        assert not _served(blocks=512)
        assert not _served(head_dim=64)
        assert not _served(model=1536)
        assert not _served(ffn=704)
        for part in ("ragged_attention", "mixture_chain", "attend_mixture"):
            with dispatch.using(**{part: "reference"}):
                assert not _served()


@pytest.mark.slow
def test_lowers_for_cuda_to_one_kernel() -> None:
    arguments, problem = _abstract()

    def step(
        fused: Any, x: Any, weights: Any, pages: Any, rows: Any, rotation: Any, norms: Any
    ) -> Any:
        state = mixture_state(2048, 128, 4096)
        options = {"choice": problem, "attention": AttentionOptions(0.1, rotation, norms)}
        return attend_mixture(fused, x, weights, pages, rows, state, **options, **OPTIONS)

    with dispatch.lowering_for("cuda"):
        text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1


def test_what_does_not_fit_together_is_refused() -> None:
    case, problem = Case(((1, 20),), padding_tokens=0), choice()
    arguments, options, _ = make(case, problem, dtype=jnp.float32, model=48, ffn=24)
    fused, residual, weights, pages, rows, state = arguments
    with pytest.raises(ValueError, match="multiple of 32 columns"):
        attend_mixture(fused[:, 1:], residual, weights, pages, rows, state, **options)
    wrong = replace(weights, router=weights.router[1:])
    with pytest.raises(ValueError, match="router must be"):
        attend_mixture(fused, residual, wrong, pages, rows, state, **options)
    with pytest.raises(ValueError, match="It has 288"):
        attend_mixture(fused, residual, weights, pages, rows, mixture_state(48, 64), **options)
