"""Plans to offload activations and weights to slower memory. Never imports torch."""
