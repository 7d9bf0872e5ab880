"""Plans of what lies where and when it is copied: activations, weights. Never imports torch."""
