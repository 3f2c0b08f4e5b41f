"""Sampling: what a request may ask for, what the device remembers of it, how a token is drawn."""

from jaxgen.sampling.demand import COMPILED_APART, Demand, compiled_demands, demand_of, largest
from jaxgen.sampling.invalid import InvalidParameter
from jaxgen.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxgen.sampling.masks import compile_mask_sizes, write_masks
from jaxgen.sampling.params import SamplingParams
from jaxgen.sampling.sample import Sampled, sample
from jaxgen.sampling.state import SamplerState, SlotRow, abstract_state, admit, init, slot_row
from jaxgen.sampling.structured import StructuredOutputs

__all__ = [
    "COMPILED_APART",
    "Demand",
    "InvalidParameter",
    "Sampled",
    "SamplerState",
    "SamplingParams",
    "SlotRow",
    "StructuredOutputs",
    "TokenLogprobs",
    "abstract_state",
    "admit",
    "compile_mask_sizes",
    "compiled_demands",
    "demand_of",
    "init",
    "largest",
    "sample",
    "slot_row",
    "token_logprobs",
    "write_masks",
]
