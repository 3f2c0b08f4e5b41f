"""Sampling: what a request may ask for, what the device remembers of it, how a token is drawn."""

from jaxgen.sampling.demand import COMPILED_APART, Demand, demand_of, largest
from jaxgen.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxgen.sampling.params import InvalidParameter, SamplingParams
from jaxgen.sampling.sample import Sampled, sample
from jaxgen.sampling.state import SamplerState, SlotRow, abstract_state, admit, init, slot_row

__all__ = [
    "COMPILED_APART",
    "Demand",
    "InvalidParameter",
    "Sampled",
    "SamplerState",
    "SamplingParams",
    "SlotRow",
    "TokenLogprobs",
    "abstract_state",
    "admit",
    "demand_of",
    "init",
    "largest",
    "sample",
    "slot_row",
    "token_logprobs",
]
