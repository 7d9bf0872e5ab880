"""Training of models whose weights exceed device memory and are streamed block by block."""
