"""How a server behaves towards its clients: names, keys, limits, parsers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxgen.serving.parsers import make_parser
from jaxgen_checkpoints.errors import ConfigError

SETTLED_BY_REQUEST = (
    "messages",
    "tools",
    "documents",
    "name",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)
"""Variables of chat templates that nobody may give otherwise."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What create_app takes beside the engine. ConfigError, naming the field, if it cannot be.

    served_model_names: what clients may call the model, the first in answers; () is the engine's.
    api_keys: any of them opens the server; () leaves it open to all.
    sampling_defaults: by SamplingParams' names, for what a request leaves out.
    return_tokens_as_token_ids: logprobs name tokens by id. force_usage: streams end with usage.
    chat_template_defaults: variables of chat templates, for what chat_template_kwargs leave out.
    tool_call_parser, reasoning_parser: names in jaxgen.serving.parsers; None reads neither.
    max_body_bytes, max_json_depth, max_choices: of one request; choices are prompts times n.
    max_queued_requests: that wait for the engine; one more is told to come back (503).
    body_seconds: to send the body in. stalled_seconds: without a byte read by the client.
    """

    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    chat_template_defaults: Mapping[str, Any] = field(default_factory=dict)
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    trust_request_chat_template: bool = False
    return_tokens_as_token_ids: bool = False
    force_usage: bool = False
    max_body_bytes: int = 32 * 2**20
    max_json_depth: int = 64
    max_choices: int = 1024
    max_queued_requests: int = 4096
    retry_after_seconds: int = 1
    body_seconds: float = 30.0
    stalled_seconds: float = 120.0
    access_log: bool = True
    metrics_prefix: str = "jaxgen"

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError("enable_auto_tool_choice needs a tool_call_parser")
        make_parser(tools=self.tool_call_parser, reasoning=self.reasoning_parser)
        clash = [name for name in SETTLED_BY_REQUEST if name in self.chat_template_defaults]
        if clash:
            raise ConfigError(f"chat_template_defaults must not hold {clash[0]}: requests have it")
        for name in ("api_keys", "served_model_names"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{name} must not be empty strings")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must begin with /, got {self.root_path!r}")
        least = {
            "max_body_bytes": 1,
            "max_json_depth": 1,
            "max_choices": 1,
            "max_queued_requests": 1,
            "retry_after_seconds": 0,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        for name in ("body_seconds", "stalled_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
