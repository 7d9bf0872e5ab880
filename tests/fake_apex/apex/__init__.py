"""A package with the interface that apex publishes (github.com/NVIDIA/apex), for tests on CPU."""
