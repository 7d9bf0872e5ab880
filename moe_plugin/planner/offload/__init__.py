"""Plans for storing and copying activations and weights in other memory. Never imports torch."""
