"""DeepSeek-V3, R1 and their kin: latent attention, sigmoid routing with a bias for the choice."""
