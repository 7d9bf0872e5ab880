"""Training of models that exceed the memory of the device. Weights are streamed block by block."""
