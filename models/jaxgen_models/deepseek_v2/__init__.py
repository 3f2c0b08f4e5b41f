"""DeepSeek-V2 and V2-Lite: latent attention, softmax routing, shared experts."""
