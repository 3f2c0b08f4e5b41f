"""Model families in Flax NNX, their configs, and the policies that map checkpoints onto them."""
