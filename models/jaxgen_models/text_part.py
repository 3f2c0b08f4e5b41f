"""The text part of a model that also takes images: a config inside a config, tensors under names
of their own.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxgen_checkpoints.container_map import ContainerMap
from jaxgen_checkpoints.source import TensorInfo
from jaxgen_models.hf_config import IGNORED, HFConfig

_TIED: Final = "tie_word_embeddings"
_HEAD: Final = "lm_head.weight"
# What stands outside counts for the whole model, whatever the text part says of itself alone.
_OUTSIDE_FIRST: Final = (("dtype", "torch_dtype"), ("eos_token_id",), ("bos_token_id",))

# As transformers names the modules since 5, and as the files on the hub name them.
_BEGINNINGS: Final = MappingProxyType(
    {
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
)


IMAGE_TENSORS: Final = (
    "vision_tower.**",
    "multi_modal_projector.**",
    "model.vision_tower.**",
    "model.multi_modal_projector.**",
)
"""What turns images into the text model's embeddings, in models built as LLaVA is."""


def read_text_part(
    hf: HFConfig,
    family: str,
    *,
    model_types: Sequence[str],
    others: Sequence[str],
    tied: bool,
    absent: Mapping[str, Any] = MappingProxyType({}),
) -> HFConfig:
    """The nested text_config, for the policy of the text model alone to read.

    model_types: what text_config may say it is, if it says so. others: outer keys that the text
      part does not depend on. tied: whether the head is, where neither config says so. absent: what
      keys that text_config leaves out mean, where the text model's own policy asks for them.
    Raises:
      ConfigError: text_config is missing or of another kind, a key outside contradicts it, or an
        outer key is not known.
    """
    text = hf.table("text_config")
    if text is None:
        raise hf.error("text_config is missing")
    kind = text.get("model_type")
    if kind is not None and kind not in model_types:
        raise hf.error(
            f"text_config is of model_type {kind!r}; the {family} family takes "
            f"{' or '.join(model_types)}"
        )
    where = f"{hf.where} text_config"
    # transformers heeds what the outer config says of the head and writes the text class's own
    # default inside; a head of its own is asked for where either does, and missed if there is none.
    said = [each.flag(_TIED, tied) for each in (hf, HFConfig(text, where)) if _TIED in each.raw]
    inner = {**absent, **text, _TIED: all(said) if said else tied}
    for keys in _OUTSIDE_FIRST:
        given = {key: hf.raw[key] for key in keys if hf.raw.get(key) is not None}
        if given:
            inner |= dict.fromkeys(keys) | given
    for key in sorted((hf.raw.keys() & inner.keys()) - IGNORED - {_TIED}):
        if hf.raw[key] != inner[key]:
            raise hf.error(
                f"{key} = {hf.raw[key]!r} and, in text_config, {inner[key]!r}: they differ"
            )
        hf.ignore(key)
    hf.ignore(*others)
    hf.finish(family)
    return HFConfig(inner, where)


def with_head_looked_for(
    hf: HFConfig, tensors: Mapping[str, TensorInfo], *, tied: bool
) -> HFConfig:
    """The config, saying whether the head is tied as the tensors show it, if they are asked for it.

    They are where the outer config ties the head and the inner one does not agree: transformers
    writes that for tied checkpoints and, by its classes' defaults, for those with a head of their
    own. tied: what an outer config means that does not say.
    """
    text = hf.raw.get("text_config")
    outer = hf.raw.get(_TIED)
    outer = tied if outer is None else outer
    if not tensors or outer is not True or not isinstance(text, dict):
        return hf
    if text.get(_TIED) not in (None, False):
        return hf
    alone = any(name.endswith(_HEAD) for name in tensors)
    said = {_TIED: not alone}
    return HFConfig({**hf.raw, **said, "text_config": {**text, **said}}, hf.where)


def text_part_map(containers: ContainerMap, others: Sequence[str]) -> ContainerMap:
    """The text model's own map, over the names that its tensors have inside the larger model.

    others: patterns of the tensors that are left out.
    """
    containers.set_other_beginnings(_BEGINNINGS)
    containers.set_unmapped_params(list(others))
    return containers
