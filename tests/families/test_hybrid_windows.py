"""Which layers slide and how each rotates, in the families that mix both kinds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxgen_checkpoints.errors import ConfigError
from jaxgen_models.exaone4.policy import Exaone4Policy
from jaxgen_models.gemma2.policy import Gemma2Policy
from jaxgen_models.gemma3.policy import Gemma3Policy
from jaxgen_models.hf_config import HFConfig


@pytest.fixture
def read(golden_dir: Callable[[str], Path]) -> Callable[[str], dict]:
    return lambda name: json.loads((golden_dir(name) / "config.json").read_text())


def test_exaone_layers_that_see_everything_rotate_only_without_a_window(
    read: Callable[[str], dict],
) -> None:
    hybrid = Exaone4Policy.read_config(HFConfig(read("exaone4_hybrid")))
    assert [rope is None for rope in hybrid.layer_ropes] == [False, False, False, True]
    full = Exaone4Policy.read_config(HFConfig(read("exaone4_full_rope")))
    assert None not in full.layer_ropes


def test_exaone_pattern_of_letters_needs_layer_types(read: Callable[[str], dict]) -> None:
    config = read("exaone4_hybrid")
    del config["layer_types"]
    with pytest.raises(ConfigError, match="needs layer_types"):
        Exaone4Policy.read_config(HFConfig(config))
    counted = Exaone4Policy.read_config(HFConfig({**config, "sliding_window_pattern": 2}))
    assert counted.windows == (9, None, 9, None)


def test_gemma3_reads_one_rotation_for_each_kind_of_layer(read: Callable[[str], dict]) -> None:
    config = read("gemma3")
    old = Gemma3Policy.read_config(HFConfig(config))
    scaling = config.pop("rope_scaling")
    tables = {
        "full_attention": {**scaling, "rope_theta": config.pop("rope_theta")},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": config.pop("rope_local_base_freq"),
        },
    }
    assert Gemma3Policy.read_config(HFConfig({**config, "rope_parameters": tables})) == old
    assert [rope == old.local_rope for rope in old.layer_ropes] == [True, True, False, True]
    with pytest.raises(ConfigError, match="one table each"):
        Gemma3Policy.read_config(HFConfig({**config, "rope_parameters": scaling}))


def test_gemma3_refuses_a_scaling_that_not_every_transformers_applies(
    read: Callable[[str], dict],
) -> None:
    config = read("gemma3")
    for scaling in ({"type": "linear"}, {"type": "linear", "rope_type": "default"}):
        with pytest.raises(ConfigError, match="rope_scaling names"):
            Gemma3Policy.read_config(
                HFConfig({**config, "rope_scaling": {"factor": 8.0, **scaling}})
            )
    both = {"factor": 8.0, "type": "linear", "rope_type": "linear"}
    scaled = Gemma3Policy.read_config(HFConfig({**config, "rope_scaling": both}))
    assert scaled == Gemma3Policy.read_config(HFConfig(config))


def test_gemma3_refuses_a_cap_that_the_reference_never_applies(read: Callable[[str], dict]) -> None:
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        Gemma3Policy.read_config(HFConfig({**read("gemma3"), "attn_logit_softcapping": 50.0}))


def test_gemma2_caps_are_on_when_absent_and_off_when_null(read: Callable[[str], dict]) -> None:
    config = read("gemma2")
    off = {**config, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    switched_off = Gemma2Policy.read_config(HFConfig(off))
    assert (switched_off.attention_soft_cap, switched_off.logit_soft_cap) == (None, None)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        del config[key]
    absent = Gemma2Policy.read_config(HFConfig(config))
    assert (absent.attention_soft_cap, absent.logit_soft_cap) == (50.0, 30.0)
