# Images that planner.launch kubernetes can name as --image; docs/launch.md says how to build and use them.
#   docker build --target cpu --tag registry/paxtrain:cpu .
#   docker build --target cuda --tag registry/paxtrain:cuda .

# `base` is the part that both images share: the checkout's place, its user and its variables.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS base
# A JobSet runs "python -m planner.run ..." with no entrypoint; relative paths such as configs/gpt_8b.py are looked
# up in the working folder. PYTHONPATH makes the package and the shipped configurations known in any other one, too.
WORKDIR /opt/paxtrain
ENV PYTHONPATH=/opt/paxtrain PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The volume of the JobSet is mounted at /data (--mount). The user must be able to write to it.
RUN useradd --uid 1000 --create-home paxtrain && mkdir /data && chown paxtrain /data

FROM base AS cpu
COPY requirements.txt ./
RUN pip install --requirement requirements.txt "kubernetes>=31"
COPY compress compress
COPY paxtrain paxtrain
COPY planner planner
COPY configs configs
COPY pyproject.toml README.md ./
RUN pip install --no-deps --editable .
USER 1000

# CUDA's and cuDNN's libraries come from PyPI with jax[cuda12]; the driver comes from the node, through NVIDIA's container
# toolkit, which reads the two variables. So the image needs no CUDA base image.
FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY requirements.txt requirements-gpu.txt ./
RUN pip install --requirement requirements-gpu.txt "kubernetes>=31"
COPY compress compress
COPY paxtrain paxtrain
COPY planner planner
COPY configs configs
COPY pyproject.toml README.md ./
RUN pip install --no-deps --editable .
USER 1000
