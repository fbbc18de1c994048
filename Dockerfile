# Lathe as an image; docs/install.md says how to use it.
#   docker build -t lathe .                              for CPUs
#   docker build --build-arg BASE=cuda -t lathe:cuda .   for NVIDIA GPUs
ARG BASE=cpu

FROM python:3.11-slim-bookworm AS cpu
# Where torch's build without CUDA lies; its version says "+cpu" and so goes before the index's own.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV TORCH_INDEX=${TORCH_INDEX}
# DeepSpeed compiles the optimizer of its offload with g++, on the machine where it runs first. Versions
# are not pinned: Debian deletes the old ones, and a pinned line would no longer build.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The wheels of torch bring CUDA's libraries. Triton compiles with g++ and Python's headers.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS cuda
ARG TORCH_INDEX=
ENV TORCH_INDEX=${TORCH_INDEX}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# One of the two above, which name their versions.
# hadolint ignore=DL3006
FROM ${BASE} AS lathe
# Who owns /data. A number is enough: programs read HOME and USER, Kubernetes wants a number.
ARG OWNER=10001
ARG EXTRAS=agents,bits,gpu,lora,plots,rouge,serve,vera,wandb
# Another index of packages, such as a mirror; without it pip's own.
ARG PIP_INDEX_URL
ENV HOME=/data USER=lathe PATH=/opt/lathe/bin:${PATH} PYTHONUNBUFFERED=1 \
    TORCHINDUCTOR_CACHE_DIR=/data/.cache/torchinductor
WORKDIR /opt/lathe/source
RUN python3 -m venv /opt/lathe
# torch by itself: it is most of the image, and a change of our code leaves this layer as it is.
COPY constraints.txt ./
RUN PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE exp_configs.py job_configs.py service.py trainval.py ./
COPY ds_configs ds_configs
COPY jobs jobs
COPY trainer trainer
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]" && pip check \
    && rm -rf build lathe_finetune.egg-info
RUN mkdir -p /data && chown "${OWNER}:${OWNER}" /data
USER ${OWNER}:${OWNER}
WORKDIR /data
VOLUME /data
EXPOSE 8100
ENTRYPOINT ["lathe"]
CMD ["--help"]
