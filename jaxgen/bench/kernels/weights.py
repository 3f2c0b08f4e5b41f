"""Cases that stream weights: a decoder layer's products, the layer as one chain, routed experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.bench.kernels.case import Case, Inputs
from pallas_kernels.expert_mlp import SharedExpert, expert_mlp
from pallas_kernels.layer_chain import ChainWeights, chain_state, layer_chain
from pallas_kernels.product import gated_product, product

_DTYPE = jnp.bfloat16
_KEEPS_SIZE = 0.6  # of silu(u) * v for normal u and v: the standard deviation that is left


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's products; fused: outputs of queries, keys and values together."""

    model: int
    ffn: int
    fused: int
    layers: int

    @property
    def weights(self) -> int:
        """Weights of one layer."""
        return self.model * (self.fused + self.model + 3 * self.ffn)


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's experts; shared: width of the one that all tokens visit, 0 for none."""

    experts: int
    top_k: int
    model: int
    ffn: int
    shared: int = 0


def products_case(name: str, shape: Layer, rows: int) -> Case:
    """The products of a layer, each by itself, over as many layers as outgrow every cache."""

    def operation(given: Any, carried: Any, implementation: str | None) -> tuple[Any, Any]:  # noqa: ANN401
        x, weights = given
        options: Any = {"weight_is_input": True, "implementation": implementation}
        fused = product(x, weights.qkv, **options)
        out = product(x, weights.out, **options)
        hidden = gated_product(x, weights.gate_up, activation="silu", **options)
        return (fused, out, product(hidden, weights.down, **options)), carried

    def inputs(key: jax.Array, layers: int) -> Inputs:
        x = _normal(key, (rows, shape.model))
        return [(x, weights) for weights in _layers(key, shape, layers)], None

    return _of_layers("layer products", name, shape, rows, operation, inputs)


def chain_case(name: str, shape: Layer, rows: int) -> Case:
    """From one layer's attention to the next one's, over as many layers; attention left out."""

    def operation(given: Any, carried: Any, implementation: str | None) -> tuple[Any, Any]:  # noqa: ANN401
        x, layers = given
        state, outputs = chain_state(), []
        for weights in layers:
            x, fused, state = layer_chain(
                x, x, weights, state,
                eps=1e-5, activation="silu", implementation=implementation,
            )  # fmt: skip
            outputs.append(fused)
        return (x, outputs), carried

    def inputs(key: jax.Array, layers: int) -> Inputs:
        return [(_normal(key, (rows, shape.model)), _layers(key, shape, layers))], None

    return _of_layers("layer chain", name, shape, rows, operation, inputs, parts=shape.layers)


def _of_layers(
    kernel: str,
    name: str,
    shape: Layer,
    rows: int,
    operation: Callable[[Any, Any, str | None], tuple[Any, Any]],
    inputs: Callable[[jax.Array, int], Inputs],
    parts: int = 1,
) -> Case:
    """Checked on one layer, timed on all; bytes and FLOPs are of one."""
    return Case(
        kernel,
        name,
        operation,
        checked=lambda key: inputs(key, 1),
        timed=lambda key: inputs(key, shape.layers),
        bytes_read=2 * shape.weights,
        flops=2 * rows * shape.weights,
        parts=parts,
    )


def experts_case(name: str, shape: Experts, tokens: int, *, calls: int) -> Case:
    """Experts that every token chooses evenly and on its own, chosen anew in each call."""
    rng = np.random.default_rng(0)
    scores = rng.random((calls, tokens, shape.experts))
    routes = np.argsort(scores, axis=-1)[..., : shape.top_k].astype(np.int32)
    if tokens == 1:  # as long as there are enough, each call has experts that no cache holds
        routes.flat[:] = np.resize(rng.permutation(shape.experts), routes.size)

    def operation(given: Any, carried: Any, implementation: str | None) -> tuple[Any, Any]:  # noqa: ANN401
        x, route, shares, up, down, shared = given
        out = expert_mlp(
            x, route, shares, up, down,
            gate=_gate, shared=shared, implementation=implementation,
        )  # fmt: skip
        return out, carried

    def inputs(key: jax.Array, calls: int) -> Inputs:
        keys = iter(jax.random.split(key, 4 + calls))
        held = (
            _scaled(next(keys), (shape.experts, 2, shape.ffn, shape.model)),
            _scaled(next(keys), (shape.experts, shape.model, shape.ffn)) / _KEEPS_SIZE,
            None,
        )
        if shape.shared:
            wide = _scaled(next(keys), (2, shape.shared, shape.model))
            narrow = _scaled(next(keys), (shape.model, shape.shared)) / _KEEPS_SIZE
            held = *held[:2], SharedExpert(wide, narrow)
        shares = jnp.full((tokens, shape.top_k), 1 / shape.top_k, jnp.float32)
        given = [
            (_normal(next(keys), (tokens, shape.model)), jnp.asarray(routes[i]), shares, *held)
            for i in range(calls)
        ]
        return given, None

    touched = float(np.mean([len(np.unique(each)) for each in routes]))
    always = shape.shared / shape.ffn
    weights_of_one = 3 * shape.model * shape.ffn
    return Case(
        "experts",
        name,
        operation,
        checked=lambda key: inputs(key, 1),
        timed=lambda key: inputs(key, calls),
        bytes_read=2 * (touched + always) * weights_of_one,
        flops=2 * tokens * (shape.top_k + always) * weights_of_one,
    )


def _gate(one: jax.Array, two: jax.Array) -> jax.Array:
    return jax.nn.silu(one) * two


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, _DTYPE)


def _scaled(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Weights [..., in] whose products are as large as what they are given."""
    return _normal(key, shape) * jnp.asarray(shape[-1] ** -0.5, _DTYPE)


def _layers(key: jax.Array, shape: Layer, count: int) -> list[ChainWeights]:
    """Drawn together and then taken apart: a program that draws each by itself compiles slowly."""
    stacked = jax.vmap(lambda key: _layer(key, shape))(jax.random.split(key, count))
    leaves, tree = jax.tree.flatten(stacked)
    return [jax.tree.unflatten(tree, [leaf[i] for leaf in leaves]) for i in range(count)]


def _layer(key: jax.Array, shape: Layer) -> ChainWeights:
    keys = jax.random.split(key, 4)
    ones = jnp.ones((shape.model,), _DTYPE)
    return ChainWeights(
        out=_scaled(keys[0], (shape.model, shape.model)),
        mlp_norm=ones,
        gate_up=_scaled(keys[1], (2, shape.ffn, shape.model)),
        down=_scaled(keys[2], (shape.model, shape.ffn)) / _KEEPS_SIZE,
        next_norm=ones,
        qkv=_scaled(keys[3], (shape.fused, shape.model)),
    )
