"""Sizes that explain themselves stay ordinary ints."""

import pickle

from jaxgen_checkpoints.dim import Dim, explain_shape

KV = Dim(2, "num_key_value_heads")
HEAD = Dim(4, "head_dim")


def test_shape_is_explained_by_config_fields():
    text = explain_shape([KV * HEAD, (KV + 2) * HEAD, 3 * HEAD, HEAD // (KV * 2), 9 - (KV - 1), 7])
    assert text == (
        "[8, 16, 12, 1, 8, 7] = [num_key_value_heads * head_dim, "
        "(num_key_value_heads + 2) * head_dim, 3 * head_dim, "
        "head_dim // (num_key_value_heads * 2), 9 - (num_key_value_heads - 1), 7]"
    )
    assert explain_shape([8, 16]) == "[8, 16]"


def test_a_dim_is_an_int_wherever_one_is_wanted():
    assert f"{KV * HEAD}" == "8"
    assert (None,) * KV == (None, None) == KV * (None,)
    assert list(range(KV)) == [0, 1]
    assert (KV * 0.5, 3.0 - KV) == (1.0, 1.0)
    assert (KV % 2, -KV) == (0, -2)
    assert {KV: "x"}[2] == "x"
    assert pickle.loads(pickle.dumps(KV * HEAD)).formula == "num_key_value_heads * head_dim"
