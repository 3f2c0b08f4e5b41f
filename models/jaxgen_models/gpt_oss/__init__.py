"""GPT-OSS: attention sinks, alternating windows, experts with biases and a clamped gate."""
