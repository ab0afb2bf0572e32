# sftron with its dependencies, for a CPU or for CUDA:
#   docker build -t sftron:cpu .
#   docker build -t sftron:cuda --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#       --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm -it -u "$(id -u):$(id -g)" -v "$PWD:/workspace" sftron:cpu init my.csv path/to/model
# With a GPU, also --gpus all --shm-size 8g, as loader workers and NCCL share memory.
# A tag such as trixie-slim moves. To get the same image again, give the digest: --build-arg BASE=debian@sha256:...
# Both bases have a Python of 3.12 or 3.13. PyPI's torch brings CUDA's libraries; the base brings the driver's settings.
ARG BASE=debian:trixie-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# gcc and Python's headers, because triton compiles the launchers of its kernels when they are first used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/sftron/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/workspace/.cache/huggingface \
    TRITON_CACHE_DIR=/tmp/triton \
    MPLCONFIGDIR=/tmp/matplotlib

# torch first: this layer is a few gigabytes with CUDA, and changes only with its version.
COPY constraints.txt /build/
RUN python3 -m venv /opt/sftron \
    && pip install --no-cache-dir -c /build/constraints.txt --index-url "${TORCH_INDEX}" \
        --extra-index-url https://pypi.org/simple torch

COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
COPY configs /build/configs
COPY examples /build/examples
RUN pip install --no-cache-dir -c /build/constraints.txt "/build[train,lora,wandb,trackio,tensorboard,mlflow,quant,quickstart]" && sftron --version

# Not root: a template, a tokenizer or a data set of others has no more rights than this user. `-u` gives it another id.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp sftron && install --directory --owner=sftron /workspace
USER sftron
WORKDIR /workspace
ENTRYPOINT ["sftron"]
CMD ["--help"]
