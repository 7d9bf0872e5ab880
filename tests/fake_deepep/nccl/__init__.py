"""A stand-in for nccl4py: `nccl.ep` alone."""
