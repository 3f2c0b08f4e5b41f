"""Routes of other servers that are known here and cannot be served; each is refused with why."""

_REASONS = {
    "embeddings": "embeddings and scores are not computed here: models here generate text",
    "stored": "nothing is stored here: send all items of a response with every request",
    "messages": "Anthropic's routes are not served: use /v1/chat/completions",
    "audio": "text only: neither sound nor pictures are read or written",
    "adapters": "LoRA adapters are not supported",
    "sleep": "the engine does not sleep: end the server, and start it again",
    "weights": "weights cannot be exchanged while the server runs",
    "profile": "no profile is taken over HTTP",
    "batches": "there are no files and no batches here: send requests",
    "pause": "the engine is not paused over HTTP: SIGTERM ends it when what runs has ended",
    "internals": "the engine's internals are not open to HTTP: see /metrics and /get_server_info",
    "envelope": "requests of this form are not served: use /v1/completions or /generate",
}
_ABSENT = {
    **dict.fromkeys(
        (
            *("/v1/embeddings", "/embeddings", "/encode", "/pooling", "/classify"),
            *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/moderations"),
        ),
        "embeddings",
    ),
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/realtime": "audio",
    "/v1/files": "batches",
    "/v1/batches": "batches",
    "/v1/load_lora_adapter": "adapters",
    "/v1/unload_lora_adapter": "adapters",
    **dict.fromkeys(
        (
            *("/sleep", "/wake_up", "/is_sleeping", "/release_memory_occupation"),
            "/resume_memory_occupation",
        ),
        "sleep",
    ),
    **dict.fromkeys(
        (
            *("/update_weights", "/start_weight_update", "/finish_weight_update"),
            *("/init_weight_transfer_engine", "/update_weights_from_disk"),
            *("/update_weights_from_tensor", "/update_weights_from_distributed"),
        ),
        "weights",
    ),
    **dict.fromkeys(
        (
            *("/pause", "/resume", "/is_paused", "/pause_generation", "/continue_generation"),
            "/abort_requests",
        ),
        "pause",
    ),
    **dict.fromkeys(("/collective_rpc", "/open_session", "/close_session"), "internals"),
    **dict.fromkeys(
        (
            *("/invocations", "/inference/v1/generate", "/v1/decisions"),
            *("/api/chat", "/api/generate", "/api/tags", "/api/show"),
            *("/v1/completions/render", "/v1/chat/completions/render"),
        ),
        "envelope",
    ),
    "/update_weights_from_ipc": "weights",
    "/start_profile": "profile",
    "/stop_profile": "profile",
}
_BEGINNINGS = {"/v1/responses/": "stored", "/v1/audio/": "audio", "/v1/images/": "audio"}


def absent(path: str) -> str | None:
    """Why a route is not there; None for one that nobody knows."""
    for beginning, reason in _BEGINNINGS.items():
        if path.startswith(beginning):
            return _REASONS[reason]
    reason = _ABSENT.get(path.rstrip("/"))
    return None if reason is None else _REASONS[reason]
