"""jaxgen: an LLM inference engine in JAX; the public face of engine, pipelines and options.

Names are imported when they are first used, so that `jaxgen --help` need not wait for JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgen.config import EngineConfig as EngineConfig, KVMemory as KVMemory
    from jaxgen.deployments import (
        Client as Client,
        DeploymentNotFound as DeploymentNotFound,
        client as client,
        serve as serve,
    )
    from jaxgen.engine.build import build_hf_engine as build_hf_engine
    from jaxgen.engine.engine import InferenceEngine as InferenceEngine
    from jaxgen.engine.outputs import (
        CompletionOutput as CompletionOutput,
        FinishReason as FinishReason,
        RequestOutput as RequestOutput,
        TokenLogprob as TokenLogprob,
    )
    from jaxgen.llm import LLM as LLM
    from jaxgen.pipelines import (
        GenerateParams as GenerateParams,
        Pipeline as Pipeline,
        Response as Response,
        pipeline as pipeline,
    )
    from jaxgen.sampling import (
        InvalidParameter as InvalidParameter,
        SamplingParams as SamplingParams,
    )
    from jaxgen.schedule.verdict import (
        SchedulingError as SchedulingError,
        SchedulingResult as SchedulingResult,
    )
    from jaxgen.static_batch import (
        StaticBatchEngine as StaticBatchEngine,
        init_inference as init_inference,
    )
    from jaxgen_checkpoints.errors import RefusedInput as RefusedInput
    from jaxgen_models.policy import InferencePolicy as InferencePolicy

_HOMES = {
    "LLM": "jaxgen.llm",
    "Client": "jaxgen.deployments",
    "CompletionOutput": "jaxgen.engine.outputs",
    "DeploymentNotFound": "jaxgen.deployments",
    "EngineConfig": "jaxgen.config",
    "FinishReason": "jaxgen.engine.outputs",
    "GenerateParams": "jaxgen.pipelines",
    "InferenceEngine": "jaxgen.engine.engine",
    "InferencePolicy": "jaxgen_models.policy",
    "InvalidParameter": "jaxgen.sampling",
    "KVMemory": "jaxgen.config",
    "Pipeline": "jaxgen.pipelines",
    "RefusedInput": "jaxgen_checkpoints.errors",
    "RequestOutput": "jaxgen.engine.outputs",
    "Response": "jaxgen.pipelines",
    "SamplingParams": "jaxgen.sampling",
    "SchedulingError": "jaxgen.schedule.verdict",
    "SchedulingResult": "jaxgen.schedule.verdict",
    "StaticBatchEngine": "jaxgen.static_batch",
    "TokenLogprob": "jaxgen.engine.outputs",
    "build_hf_engine": "jaxgen.engine.build",
    "client": "jaxgen.deployments",
    "init_inference": "jaxgen.static_batch",
    "pipeline": "jaxgen.pipelines",
    "serve": "jaxgen.deployments",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxgen' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
