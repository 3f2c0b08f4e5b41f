"""Which layers attend through a sliding window, in the spellings of the configs."""

from jaxgen_models.hf_config import HFConfig

Windows = tuple[int | None, ...]


def layer_type_windows(hf: HFConfig, num_layers: int, window: int | None) -> Windows | None:
    """Windows by an explicit `layer_types` list, or None where the config has no such list."""
    types = hf.items("layer_types")
    if types is None:
        return None
    known = {"full_attention": None, "sliding_attention": window}
    if len(types) != num_layers:
        raise hf.error(f"layer_types has {len(types)} entries for {num_layers} layers")
    for kind in types:
        if kind not in known:
            raise hf.error(
                f"layer_types entry {kind!r} is not known; supported: {', '.join(known)}"
            )
    if "sliding_attention" in types and window is None:
        raise hf.error("layer_types asks for sliding_attention but no sliding_window is set")
    return tuple(known[kind] for kind in types)


def every_layer_windows(hf: HFConfig, num_layers: int, absent: int | None = 4096) -> Windows:
    """Mistral: one window for all layers, 4096 where the key is absent; null switches it off.

    transformers has the same window in all layers whatever layer_types says, so a list that says
    otherwise is refused.
    """
    window = hf.optional_size("sliding_window", absent=absent)
    windows = (None if window is None else int(window),) * int(num_layers)
    if layer_type_windows(hf, num_layers, windows[0]) not in (None, windows):
        raise hf.error(f"layer_types must be alike: sliding_window = {windows[0]} is every layer's")
    return windows


def periodic_windows(hf: HFConfig, num_layers: int, *, window: int, period: int) -> Windows:
    """Hybrids: every period-th layer sees everything, the others look through the window, unless
    layer_types says it layer by layer.
    """
    explicit = layer_type_windows(hf, num_layers, int(window))
    if explicit is not None:
        return explicit
    return tuple(None if (i + 1) % period == 0 else int(window) for i in range(num_layers))


def hybrid_windows(hf: HFConfig, num_layers: int, *, absent: int, period: int) -> Windows:
    """periodic_windows with `sliding_window`, `absent` where the config has no such key; null is
    refused where a layer slides.
    """
    window = hf.optional_size("sliding_window", absent=absent)
    if window is not None:
        return periodic_windows(hf, num_layers, window=window, period=period)
    explicit = layer_type_windows(hf, num_layers, None)
    if explicit is None:
        raise hf.error("sliding_window is null, but some layers attend through a window")
    return explicit


def upper_layer_windows(hf: HFConfig, num_layers: int) -> Windows:
    """Qwen: with use_sliding_window, layers from max_window_layers on attend through the window."""
    hf.ignore("max_window_layers", "sliding_window")
    width = None
    if hf.flag("use_sliding_window", False):
        window = hf.optional_size("sliding_window", absent=4096)
        width = None if window is None else int(window)
    explicit = layer_type_windows(hf, num_layers, width)
    if explicit is not None:
        return explicit
    first = hf.raw.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise hf.error(f"max_window_layers must be a layer number, got {first!r}")
    return tuple(width if i >= first else None for i in range(num_layers))
