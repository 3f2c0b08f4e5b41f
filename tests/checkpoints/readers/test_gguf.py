"""GGUF in Hugging Face clothes: values per type, row order, config, and malformed files."""

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind, quants

from jaxgen_checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxgen_checkpoints.errors import CheckpointError, ConfigError

MODEL, HEADS, KV_HEADS, HEAD, VOCAB = 256, 4, 2, 64, 24
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def write(path: Path, arch: str = "llama", tensors: dict | None = None, **changes: object) -> Path:
    """A one-layer GGUF file; `changes` replace (or with None, remove) its metadata."""
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": MODEL,
        "feed_forward_length": 512,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    numbers = {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0}
    for key, value in (sizes | numbers | changes).items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for name, (data, kind) in (
        {"token_embd.weight": (random(VOCAB, MODEL), Kind.F32)} | (tensors or {})
    ).items():
        stored = data if data.dtype == np.uint8 else quants.quantize(data, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(opened: Checkpoint, name: str, *index: slice) -> np.ndarray:
    info = opened.source.tensors()[name]
    assert info.dtype == np.float32
    return opened.source.read(name, index or tuple(slice(None) for _ in info.shape))


def blocks_of(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Stored bytes; K types, which the package cannot quantise, are random valid blocks."""
    if not kind.name.endswith("_K"):
        return quants.quantize(random(rows, columns), kind).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (rows, columns // block, size), np.uint8)
    scales = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (size - 2,)}[kind]
    for at in scales:  # float16 scales must be finite
        raw[..., at : at + 2] = np.array([0.03], np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize(
    "kind",
    [
        Kind.F32,
        Kind.F16,
        Kind.BF16,
        Kind.Q8_0,
        Kind.Q4_0,
        Kind.Q4_1,
        Kind.Q4_K,
        Kind.Q5_K,
        Kind.Q6_K,
    ],
)
def test_every_type_by_slices(kind, tmp_path):
    raw = blocks_of(kind, MODEL, 512)
    whole = quants.dequantize(raw, kind)
    path = write(tmp_path / "m.gguf", tensors={"blk.0.ffn_down.weight": (raw, kind)})
    opened = open_checkpoint(path)
    np.testing.assert_array_equal(read(opened, DOWN_PROJ), whole)
    for rows, columns in [
        ((3, 9), (0, 512)),
        ((0, 256), (5, 6)),
        ((7, 8), (250, 300)),
        ((4, 4), (0, 1)),
    ]:
        part = read(opened, DOWN_PROJ, slice(*rows), slice(*columns))
        np.testing.assert_array_equal(part, whole[slice(*rows), slice(*columns)])


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to query and key rows of a Llama."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_query_rows_come_in_hugging_face_order(arch, tmp_path):
    weight, bias = random(HEADS * HEAD, MODEL), random(HEADS * HEAD)
    stored = [interleave(array, HEADS) if arch == "llama" else array for array in (weight, bias)]
    path = write(
        tmp_path / "m.gguf",
        arch,
        {"blk.0.attn_q.weight": (stored[0], Kind.F32), "blk.0.attn_q.bias": (stored[1], Kind.F32)},
    )
    opened = open_checkpoint(path)
    np.testing.assert_array_equal(read(opened, Q_PROJ), weight)
    np.testing.assert_array_equal(
        read(opened, Q_PROJ, slice(60, 131), slice(3, 9)), weight[60:131, 3:9]
    )
    np.testing.assert_array_equal(
        read(opened, Q_PROJ.replace("weight", "bias"), slice(1, 3)), bias[1:3]
    )


def test_config_as_config_json_would_have_it(tmp_path):
    config = open_checkpoint(write(tmp_path / "m.gguf")).config
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": MODEL,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 2,
    }


def test_ends_and_tokenizer_metadata(tmp_path):
    opened = open_checkpoint(
        write(tmp_path / "m.gguf", tensors={"output.weight": (random(VOCAB, MODEL), Kind.F16)})
    )
    assert opened.generation_config["eos_token_id"] == [2, 5]
    assert opened.gguf_tokenizer["tokenizer.ggml.tokens"][-1] == f"t{VOCAB - 1}"
    assert opened.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in opened.source.tensors()


def llama3_factors(factor: float, low: float, high: float, original: int) -> np.ndarray:
    factors = []
    for i in range(0, HEAD, 2):
        wavelength = 2 * np.pi * 500000.0 ** (i / HEAD)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_found_again_from_its_factors(tmp_path):
    factors = llama3_factors(32.0, 1.0, 4.0, 8192)
    opened = open_checkpoint(
        write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": (factors, Kind.F32)})
    )
    assert opened.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in opened.source.tensors()
    odd = {"rope_freqs.weight": (factors[::-1].copy(), Kind.F32)}
    with pytest.raises(ConfigError, match="of a kind that is not read"):
        open_checkpoint(write(tmp_path / "odd.gguf", tensors=odd))


def test_linear_and_yarn_scaling(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    opened = open_checkpoint(write(tmp_path / "linear.gguf", **linear))
    assert opened.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}
    opened = open_checkpoint(write(tmp_path / "yarn.gguf", **(linear | yarn)))
    assert opened.config["rope_scaling"]["original_max_position_embeddings"] == 32


@pytest.mark.parametrize(
    ("arch", "changes", "complaint"),
    [
        ("mamba", {}, "'mamba' is not read; read are llama, mistral, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixtures of experts"),
        ("llama", {"embedding_length": None}, r"llama\.embedding_length, got None"),
        ("llama", {"rope.dimension_count": 32}, "expected the head size 64"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope' is not read"),
        ("llama", {"attention.sliding_window": 64}, "sliding_window"),
    ],
)
def test_metadata_that_makes_no_config(arch, changes, complaint, tmp_path):
    with pytest.raises(ConfigError, match=complaint):
        open_checkpoint(write(tmp_path / "m.gguf", arch, **changes))


def test_unread_type_is_refused_by_name(tmp_path):
    raw = np.zeros((MODEL, 512 // 256 * 84), np.uint8)
    path = write(tmp_path / "m.gguf", tensors={"blk.0.ffn_down.weight": (raw, Kind.Q2_K)})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is Q2_K"):
        open_checkpoint(path)


def test_every_truncation_is_refused(tmp_path):
    data = write(tmp_path / "m.gguf").read_bytes()
    for size in [*range(0, 900, 37), len(data) - 64]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"reaches to byte|too few"):
            open_checkpoint(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("at", "replacement", "complaint"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, (9).to_bytes(4, "little"), "version 9 is not known"),
        (4, (3).to_bytes(4, "big"), "big-endian"),
        (8, (2**60).to_bytes(8, "little"), "bytes|dimensions|UTF-8|type number"),
        (16, (2**60).to_bytes(8, "little"), "bytes|type|UTF-8|twice"),
        (24, (2**63).to_bytes(8, "little"), "its header reaches to byte"),
    ],
)
def test_damaged_header_is_refused_in_finite_time(at, replacement, complaint, tmp_path):
    data = write(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "bad.gguf").write_bytes(data[:at] + replacement + data[at + len(replacement) :])
    with pytest.raises(CheckpointError, match=complaint):
        open_checkpoint(tmp_path / "bad.gguf")


def test_header_agrees_with_the_package(tmp_path):
    path = write(tmp_path / "m.gguf", tensors={"output_norm.weight": (random(MODEL), Kind.F32)})
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    opened = open_checkpoint(path)
    np.testing.assert_array_equal(
        read(opened, "model.norm.weight"), tensors["output_norm.weight"].data
    )
    np.testing.assert_array_equal(
        read(opened, "model.embed_tokens.weight"), tensors["token_embd.weight"].data
    )


def test_every_tensor_of_smollm2(smollm2_gguf, smollm2_expected):
    opened = open_checkpoint(smollm2_gguf)
    recorded = json.loads((smollm2_expected / "gguf_tensors.json").read_text())["tensors"]
    assert {entry["hf_name"] for entry in recorded} == opened.source.tensors().keys()
    for entry in recorded:
        values = read(opened, entry["hf_name"])
        assert hashlib.sha256(values.tobytes()).hexdigest() == entry["hf_f32_sha256"]
    config = json.loads((smollm2_expected / "config.json").read_text())
    same = opened.config.keys() & config.keys() - {"torch_dtype"}
    assert len(same) > 15
    assert {key: opened.config[key] for key in same} == {key: config[key] for key in same}
