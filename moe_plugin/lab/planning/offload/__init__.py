"""Plans of what lies where, explained; pre-gated experts and memory of peers, simulated."""
