"""The text parts of models that also take images: nested configs, tensors in two layouts, and
nothing of the images.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from jaxgen.engine.build import config_checkpoint
from jaxgen_checkpoints.checkpoint import open_checkpoint
from jaxgen_checkpoints.errors import CheckpointError, ConfigError
from jaxgen_checkpoints.mesh_layout import MeshLayout, make_mesh
from jaxgen_checkpoints.readers.memory import MemorySource
from jaxgen_checkpoints.source import TensorSource
from jaxgen_models.registry import find_policy

KEYS: Final = json.loads((Path(__file__).parent / "config_keys.json").read_text())
FIXTURES: Final = ("gemma3_multimodal", "mistral3")
TEXT: Final = {"gemma3_multimodal": "gemma3", "mistral3": "mistral"}
GENERATION: Final = {"bos_token_id", "eos_token_id"}

# What config.json of the published Gemma 3 4B holds.
GEMMA_4B: Final[dict[str, Any]] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


@pytest.fixture
def config(golden_dir: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    return lambda name: json.loads((golden_dir(name) / "config.json").read_text())


def read(config: dict[str, Any], **inner: object) -> Any:
    text = {**config["text_config"], **inner}
    return find_policy({**config, "text_config": text}, {}).policy.config


def answer(config: dict[str, Any], **inner: object) -> Any:
    """As read, or why it is refused."""
    try:
        return read(config, **inner)
    except ConfigError as error:
        return str(error)


def described(config: dict[str, Any], source: TensorSource) -> dict[str, Any]:
    containers = find_policy(config, {}).policy.build_container_map()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return containers.describe(source, MeshLayout(make_mesh()))


def arrays(folder: Path) -> dict[str, np.ndarray]:
    source = open_checkpoint(folder).source
    return {
        name: source.read(name, tuple(slice(0, size) for size in info.shape))
        for name, info in source.tensors().items()
    }


def newer(name: str) -> str:
    """The name that a tensor of the hub's files has among transformers' modules since 5."""
    for there, here in (("model.", "model.language_model."), ("lm_head.", "lm_head.")):
        if name.startswith(f"language_model.{there}"):
            return here + name.removeprefix(f"language_model.{there}")
    return f"model.{name}"


@pytest.mark.parametrize("name", FIXTURES)
def test_both_layouts_hold_the_same_weights(golden_dir, config, name):
    stored = arrays(golden_dir(name))
    assert {each.partition(".")[0] for each in stored} == {
        "language_model",
        "multi_modal_projector",
        "vision_tower",
    }
    renamed = {newer(each): values for each, values in stored.items()}
    assert not renamed.keys() & stored.keys()
    here, there = (described(config(name), MemorySource(each)) for each in (stored, renamed))
    assert here.keys() == there.keys()
    assert ("unembed" in here) == (name == "mistral3")
    for ours, theirs in zip(
        [*here.pop("layers"), here], [*there.pop("layers"), there], strict=True
    ):
        for key, weight in ours.items():
            everything = tuple(slice(0, size) for size in weight.shape)
            values = weight.placed().read(everything), theirs[key].placed().read(everything)
            np.testing.assert_array_equal(*values)


@pytest.mark.parametrize(
    ("respell", "start"), [(str, "language_model.model"), (newer, "model.language_model")]
)
def test_messages_name_tensors_as_the_file_does(golden_dir, config, respell, start):
    tensors = {respell(name): value for name, value in arrays(golden_dir("mistral3")).items()}
    del tensors[f"{start}.norm.weight"], tensors[f"{start}.layers.1.mlp.up_proj.weight"]
    tensors[f"{start}.layers.2.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError) as caught:
        described(config("mistral3"), MemorySource(tensors))
    for words in ("norm.weight: missing", "layers.1.mlp.up_proj.weight: missing"):
        assert f"{start}.{words}" in str(caught.value)


def test_the_published_config_is_enough_to_plan():
    checkpoint = config_checkpoint(GEMMA_4B)
    shapes = [info.shape for info in checkpoint.source.tensors().values()]
    assert sum(int(np.prod(shape)) for shape in shapes) == 3_880_263_168
    config = read(GEMMA_4B)
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_context) == (262208, 131072)
    assert config.windows[4:7] == (1024, None, 1024)
    assert (config.rope.factor, config.rope.theta, config.local_rope.theta) == (8.0, 1e6, 1e4)
    assert (config.tied, config.dtype, config.eos_token_ids) == (True, "bfloat16", (1, 106))


@pytest.mark.parametrize("name", FIXTURES)
def test_an_inner_key_left_out_means_the_text_class_default(config, name):
    whole = config(name)
    for key, default in KEYS[TEXT[name]].items():
        if key in GENERATION:
            continue
        text = {inner: value for inner, value in whole["text_config"].items() if inner != key}
        absent = answer({**whole, "text_config": text})
        if name == "mistral3" and isinstance(absent, str) and f"{key} is missing" in absent:
            continue  # a size that every checkpoint says
        assert absent == answer(whole, **{key: default}), key


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, None),
        (True, {}, True),
        ({}, True, True),
        (True, True, True),
        (False, {}, False),
        # transformers writes these two for the defaults of Mistral 3, and for an untied Gemma 3.
        (True, False, False),
        (False, True, False),
    ],
)
@pytest.mark.parametrize("name", [*FIXTURES, "exaone4_5_text"])
def test_a_head_of_its_own_is_wanted_where_either_config_says_so(config, name, outer, inner, tied):
    whole = config(name)
    for table, value in ((whole, outer), (whole["text_config"], inner)):
        table.pop("tie_word_embeddings", None)
        if value != {}:
            table["tie_word_embeddings"] = value
    assert read(whole).tied == (name == "gemma3_multimodal" if tied is None else tied)


@pytest.mark.parametrize(
    ("outer", "inner", "looked_for"),
    [
        (True, False, {"gemma3_multimodal", "mistral3", "exaone4_5_text"}),
        (True, None, {"gemma3_multimodal", "mistral3", "exaone4_5_text"}),
        (None, None, {"gemma3_multimodal", "mistral3"}),
        (None, False, {"gemma3_multimodal", "mistral3"}),
        (False, None, set()),
        (False, False, set()),
        (True, True, set()),
    ],
)
@pytest.mark.parametrize("name", [*FIXTURES, "exaone4_5_text"])
def test_the_tensors_show_the_head_where_configs_leave_it_open(
    golden_dir, config, name, outer, inner, looked_for
):
    whole = config(name)
    stored = open_checkpoint(golden_dir(name)).source.tensors()
    tied = {each: info for each, info in stored.items() if not each.endswith("lm_head.weight")}
    untied = {**tied, "language_model.lm_head.weight": next(iter(tied.values()))}
    for table, value in ((whole, outer), (whole["text_config"], inner)):
        table["tie_word_embeddings"] = value
        if value is None:
            del table["tie_word_embeddings"]
    found = [find_policy(whole, tensors).policy.config.tied for tensors in (tied, untied)]
    said = find_policy(whole, {}).policy.config.tied
    assert found == ([True, False] if name in looked_for else [said, said])


def test_what_stands_outside_counts_for_the_whole(config):
    whole = config("mistral3")
    inner = read(whole, dtype="float32", torch_dtype="float32", eos_token_id=2)
    assert (inner.dtype, inner.eos_token_ids) == ("bfloat16", (2,))
    assert read({**whole, "eos_token_id": [2, 4]}, eos_token_id=2).eos_token_ids == (2, 4)
    assert read({**whole, "vocab_size": 136}) == read(whole)


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ({"text_config": None}, {}, "config.json: text_config is missing"),
        ({"text_config": "small"}, {}, "text_config must be an object"),
        ({}, {"model_type": "ministral3"}, "text_config is of model_type 'ministral3'"),
        ({"vocab_size": 137}, {}, "vocab_size = 137 and, in text_config, 136: they differ"),
        ({"mystery_gate": 3}, {}, "does not implement mystery_gate"),
        ({}, {"mystery_gate": 3}, "text_config: the .* does not implement mystery_gate"),
        ({"tie_word_embeddings": "yes"}, {}, "config.json: tie_word_embeddings must be true"),
        ({}, {"tie_word_embeddings": 1}, "text_config: tie_word_embeddings must be true"),
        ({}, {"hidden_size": -1}, "text_config: hidden_size must be a positive"),
        ({}, {"quantization_config": {"quant_method": "x"}}, "text_config: quantization_config"),
    ],
)
def test_what_is_wrong_is_named(config, name, outer, inner, words):
    whole = config(name)
    whole["text_config"] |= inner
    with pytest.raises(ConfigError, match=words):
        find_policy({**whole, **outer}, {})
