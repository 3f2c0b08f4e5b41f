"""Falcon: parallel blocks over one, few or all KV heads, rotary or ALiBi."""
