"""Compare whole training steps with our layer and with the layer of the host framework."""
