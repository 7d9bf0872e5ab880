# moe-plugin with fairseq and Megatron-core on NVIDIA's PyTorch, for GPUs. We have not built this
# image, and no test does. The torch of the base image is used unchanged.
#
#   docker build -t moe-plugin .
#   docker run --rm -it --gpus all --ipc host moe-plugin moe-plugin doctor
FROM nvcr.io/nvidia/pytorch:25.06-py3
WORKDIR /opt/moe-plugin
COPY . .
RUN bash scripts/setup.sh --training
ENV PATH="/opt/moe-plugin/.venv/bin:$PATH"
WORKDIR /workspace
