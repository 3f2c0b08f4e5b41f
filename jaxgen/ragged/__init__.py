"""Host state of the ragged batch: blocks, sequences, buckets, and the packed metadata of a step."""
