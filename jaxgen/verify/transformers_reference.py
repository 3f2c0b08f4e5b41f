"""transformers at work on CPU as the reference: its logits, its greedy tokens, its hidden states.

torch and transformers are imported here only, and only when they are asked for.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen.verify.recording import FLOAT32_LOGITS, RecordedPrompt, Recording
from jaxgen_checkpoints.errors import RefusedInput
from jaxgen_checkpoints.snapshot import SNAPSHOT_FILE

GREEDY_STEPS = 16
NARROW_FACTOR = 2

_LIKELIEST = 5
_RANDOM_LENGTHS = (1, 7, 16, 33)


class TransformersReference:
    """A model of transformers, in float32 with eager attention and experts, beside ours."""

    def __init__(self, model: Path) -> None:
        """RefusedInput where torch and transformers are missing, or cannot read the model."""
        self._torch, self._transformers = _import("torch"), _import("transformers")
        if (model / SNAPSHOT_FILE).exists():
            raise RefusedInput(
                f"{model}: transformers cannot read a snapshot; verify the checkpoint that it was "
                "converted from"
            )
        self._path = model
        self._transformers.logging.set_verbosity_error()
        self._transformers.logging.disable_progress_bar()
        self._model = self._load("float32")
        # Greedy and through every end of text, whatever the checkpoint's own defaults say.
        self._model.generation_config = self._transformers.GenerationConfig(
            max_new_tokens=GREEDY_STEPS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            use_cache=not _outgrows_its_keys(self._model.config.get_text_config()),
        )

    def record(self, prompts: Sequence[np.ndarray], *, narrow: bool) -> Recording:
        """The reference's float32 answers; narrow: bounds follow from its own bfloat16 error."""
        logits = [self._logits(self._model, ids) for ids in prompts]
        bounds = [FLOAT32_LOGITS] * len(prompts)
        if narrow:
            rounded = self._load("bfloat16")
            bounds = [
                NARROW_FACTOR * float(np.abs(self._logits(rounded, ids) - exact).max())
                for ids, exact in zip(prompts, logits, strict=True)
            ]
        recorded = [
            RecordedPrompt(ids, exact, *self._greedy(ids), bound)
            for ids, exact, bound in zip(prompts, logits, bounds, strict=True)
        ]
        return Recording(
            f"transformers {self._transformers.__version__}", recorded, exact=not narrow
        )

    def hidden_states(self, ids: np.ndarray) -> np.ndarray:
        """float32 [layers + 1, tokens, model]: the embedding's output and each block's."""
        blocks = self._blocks()
        last: list[Any] = []
        # transformers' own last hidden state comes after the final norm; the block's own does not.
        hook = blocks[-1].register_forward_hook(lambda _, __, output: last.append(output))
        try:
            with self._torch.no_grad():
                states = self._model(self._batch(ids), output_hidden_states=True).hidden_states
        finally:
            hook.remove()
        output = last[0][0] if isinstance(last[0], tuple) else last[0]
        return np.stack([state[0].numpy() for state in (*states[:-1], output)])

    def _blocks(self) -> Any:  # noqa: ANN401 (a torch ModuleList)
        layers = self._model.config.get_text_config().num_hidden_layers
        for module in self._model.get_decoder().modules():
            if isinstance(module, self._torch.nn.ModuleList) and len(module) == layers:
                return module
        raise RefusedInput(f"{self._path}: transformers' model has no list of {layers} layers")

    def _load(self, dtype: str) -> Any:  # noqa: ANN401 (a transformers model)
        gguf = {"gguf_file": self._path.name} if self._path.is_file() else {}
        folder = self._path.parent if gguf else self._path
        known = {"local_files_only": True, **gguf}
        try:
            config = self._transformers.AutoConfig.from_pretrained(folder, **known)
            model = self._class(config).from_pretrained(
                folder, dtype=dtype, attn_implementation=_attention(config), **known
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
            raise RefusedInput(f"{self._path}: transformers cannot load it: {error}") from error
        # Grouped products, its default since 5, refuse widths that are no multiples of 16 bytes.
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        return model.eval()

    def _class(self, config: Any) -> Any:  # noqa: ANN401 (transformers' config and model class)
        """That of the checkpoint itself: not all that have text among the rest are among Auto's."""
        auto = self._transformers.AutoModelForCausalLM
        return getattr(self._transformers, (config.architectures or [""])[0], auto)

    def _batch(self, ids: np.ndarray) -> Any:  # noqa: ANN401 (a torch tensor)
        return self._torch.from_numpy(ids.astype(np.int64))[None]

    def _logits(self, model: Any, ids: np.ndarray) -> np.ndarray:  # noqa: ANN401
        with self._torch.no_grad():
            return model(self._batch(ids)).logits[0].float().numpy()

    def _greedy(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int32 [steps] and the top five log-probabilities of each step, with a KV cache."""
        batch = self._batch(ids)
        out = self._model.generate(batch, attention_mask=self._torch.ones_like(batch))
        rows = self._torch.stack(out.logits)[:, 0].double()
        likely = self._torch.log_softmax(rows, -1).topk(_LIKELIEST)
        return likely.indices[:, 0].numpy().astype(np.int32), likely.values.float().numpy()


def random_prompts(vocab_size: int, longest: int) -> list[np.ndarray]:
    """A few seeded prompts of ragged lengths, as far as the context has room for them."""
    rng = np.random.default_rng(0)
    lengths = [min(length, longest - GREEDY_STEPS) for length in _RANDOM_LENGTHS]
    return [
        rng.integers(0, vocab_size, length).astype(np.int32)
        for length in dict.fromkeys(lengths)
        if length > 0
    ]


def first_layer_off(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> str:
    """Names the first of [layers + 1, tokens, model] states that differ beyond `tolerance`.

    tolerance: of the largest difference, relative to the root mean square of the layer's state.
    """
    for layer, (state, truth) in enumerate(zip(ours, theirs, strict=True)):
        scale = float(np.sqrt(np.mean(np.square(truth, dtype=np.float64)))) or 1.0
        off = float(np.abs(state - truth).max()) / scale
        if not off <= tolerance:
            name = "the embedding" if layer == 0 else f"layer {layer - 1}"
            return f"{name} (hidden states off by {off:.1e} of their size)"
    return "none: hidden states agree, look at the final norm and the unembedding"


def _attention(config: Any) -> str:  # noqa: ANN401 (a transformers config)
    """Eager, but where that counts ALiBi twice (4.57, 5.24) the one that counts it once."""
    twice = config.model_type == "falcon" and config.alibi
    return "sdpa" if twice else "eager"


def _outgrows_its_keys(config: Any) -> bool:  # noqa: ANN401 (a transformers config)
    """Whether keys written early would rotate otherwise later: longrope's, which only some of
    transformers' models write anew.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return "longrope" in (rope.get("rope_type"), rope.get("type"))


def _import(name: str) -> Any:  # noqa: ANN401 (a module that need not be installed)
    try:
        return import_module(name)
    except ImportError as error:
        raise RefusedInput(
            f"verifying against transformers needs {name}, which is not installed: `pip install "
            "torch transformers` beside jaxgen, or compare with a recording: --golden expected.npz"
        ) from error
