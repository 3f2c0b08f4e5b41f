"""What GPT-OSS needs to know beside what every decoder with experts does."""

from dataclasses import dataclass

from jaxgen_models.moe_config import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(MoEConfig):
    """swiglu_alpha, swiglu_limit: how steep an expert's gate is, and where both halves are cut."""

    swiglu_alpha: float
    swiglu_limit: float
