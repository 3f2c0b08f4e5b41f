"""Config fields of the older families, whose heads simply share out the model's width."""

from typing import Any

from jaxgen_checkpoints.dim import Dim
from jaxgen_models.decoder_config import read_dtype
from jaxgen_models.hf_config import HFConfig


def head_width(hf: HFConfig, model_dim: Dim, heads: Dim) -> Dim:
    """The width of a head; refused where the heads do not share out the model's width evenly."""
    if model_dim % heads:
        raise hf.error(
            f"{model_dim.formula} = {model_dim} is no multiple of {heads.formula} = {heads}"
        )
    return model_dim // heads


def token_fields(
    hf: HFConfig, *, tied: bool, vocab_size: int, eos: int, bos: int | None = None
) -> dict[str, Any]:
    """Fields of a DecoderConfig: the head, the stored type and special tokens.

    tied, eos, bos: what an absent key means. An EOS that only the family's default names and that
    is outside the vocabulary is left out.
    """
    eos_ids = hf.token_ids("eos_token_id")
    if "eos_token_id" not in hf.raw and eos < vocab_size:
        eos_ids = (eos,)
    bos_ids = hf.token_ids("bos_token_id")
    if "bos_token_id" not in hf.raw and bos is not None and bos < vocab_size:
        bos_ids = (bos,)
    return {
        "vocab_size": vocab_size,
        "tied": hf.flag("tie_word_embeddings", tied),
        "dtype": read_dtype(hf),
        "eos_token_ids": eos_ids,
        "bos_token_id": next(iter(bos_ids), None),
    }
