"""Mixtral: Mistral's attention, experts in every layer."""
