"""Against a recording: the right weights agree, one changed weight is a mismatch with a place."""

import json
import shutil

import numpy as np
import pytest

from jaxgen.cli import main
from jaxgen.verify.compare import Answer, compare
from jaxgen.verify.golden import read_recording
from jaxgen.verify.recording import RecordedPrompt, Recording
from jaxgen_checkpoints.errors import RefusedInput


def verify(capsys, model, golden, *options):
    code = main(["verify", str(model), "--golden", str(golden), *options])
    return code, capsys.readouterr().out


def test_the_recorded_checkpoint_is_verified(golden_dir, capsys):
    folder = golden_dir("llama_plain")
    code, out = verify(capsys, folder, folder / "expected.npz", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["verified"]
    assert report["first_divergence"] is None
    for prompt in report["prompts"]:
        assert prompt["max_abs_error"] < 5e-5
        assert prompt["greedy_equal"] == prompt["greedy_steps"] == 24
        assert prompt["top5_error"] < 1e-4
        assert prompt["top1_agreement"] == 1.0


def test_a_changed_weight_is_a_mismatch_with_its_place(golden_dir, wrong_llama, capsys):
    wrong = wrong_llama("model.layers.1.mlp.down_proj.weight")
    code, out = verify(capsys, wrong, golden_dir("llama_plain") / "expected.npz")
    assert code == 1
    assert "MISMATCH in float32" in out
    assert "first divergence: prompt 0, position 0: logits are off by" in out


def test_dynamic_rope_goes_beyond_the_config(golden_dir, capsys):
    folder = golden_dir("llama_dynamic")
    code, out = verify(capsys, folder, folder / "expected.npz")
    assert code == 0, out


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"text", "not an .npz file"), ({"a": 1}, "n_prompts")],
)
def test_what_is_no_recording_is_refused(tmp_path, content, message):
    path = tmp_path / "expected.npz"
    if isinstance(content, dict):
        np.savez(path, **content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(RefusedInput, match=message):
        read_recording(path, narrow=False)


def test_bounds_follow_the_type_and_the_metadata(golden_dir, tmp_path):
    folder = golden_dir("llama_plain")
    exact = read_recording(folder / "expected.npz", narrow=False)
    assert {prompt.logit_bound for prompt in exact.prompts} == {2e-4}
    narrow = read_recording(folder / "expected.npz", narrow=True)
    said = json.loads((folder / "meta.json").read_text())["bf16"]["max_abs_logit_err_per_prompt"]
    bounds = [prompt.logit_bound for prompt in narrow.prompts]
    assert bounds == pytest.approx([2 * error for error in said], abs=2e-4)
    shutil.copy(folder / "expected.npz", tmp_path)
    (tmp_path / "meta.json").write_text('{"f32_atol": 1e-5}')
    strict = read_recording(tmp_path / "expected.npz", narrow=False)
    assert strict.prompts[0].logit_bound == 1e-5


class TestCompare:
    """One prompt of three tokens, a vocabulary of four, two generated tokens."""

    logits = np.tile(np.array([0.0, 1.0, 2.0, 3.0], np.float32), (3, 1))
    greedy = np.array([3, 1], np.int32)
    top5 = np.full((2, 5), -1.0, np.float32)

    def result(self, *, exact=True, **changes):
        prompt = RecordedPrompt(np.arange(3), self.logits, self.greedy, self.top5, 2e-4)
        answer = {"logits": self.logits, "greedy": self.greedy, "top5_logprobs": self.top5}
        (result,) = compare(Recording("r", [prompt], exact), [Answer(**answer | changes)])
        return result

    def test_equal(self):
        result = self.result()
        assert result.divergence is None
        assert (result.max_abs_error, result.mean_kl, result.top1_agreement) == (0.0, 0.0, 1.0)

    def test_logits_off_at_a_position(self):
        wrong = self.logits.copy()
        wrong[1, 2] += 2.0
        found = self.result(logits=wrong).divergence
        assert (found.position, found.generated) == (1, False)
        assert self.result(logits=wrong).top1_agreement == pytest.approx(2 / 3)

    def test_not_a_number_is_never_equal(self):
        wrong = self.logits.copy()
        wrong[2, 0] = np.nan
        result = self.result(logits=wrong)
        assert result.divergence.position == 2
        assert result.max_abs_error == result.mean_kl == np.inf

    def test_another_token(self):
        found = self.result(greedy=np.array([3, 2], np.int32)).divergence
        assert (found.position, found.generated) == (1, True)
        assert "expected token 1, got 2" in found.sentence

    def test_logprobs_off_before_another_token(self):
        found = self.result(
            greedy=np.array([3, 2], np.int32), top5_logprobs=self.top5 + np.float32(0.1)
        ).divergence
        assert (found.position, found.generated) == (0, True)
        assert "log-probabilities" in found.sentence

    def test_a_narrow_type_is_judged_by_its_logits(self):
        other = np.array([3, 2], np.int32)
        assert self.result(exact=False, greedy=other).divergence is None
