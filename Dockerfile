# flashflow for the CPU, or for CUDA:
#     docker build --tag flashflow .
#     docker build --tag flashflow:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
# Run with shared memory for two copies of the weights:
#     docker run --shm-size 8g --volume "$PWD/runs:/work/runs" flashflow train configs/quickstart.yaml
#     docker run --gpus all --shm-size 32g ... flashflow:cuda train ...
ARG BASE=debian:12-slim
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 python3-venv make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /work
# What changes seldom comes first: the environment is made once for many versions of the code.
COPY pyproject.toml requirements.lock README.md LICENSE Makefile ./
# Which build of torch fits is the package index's choice; INDEX names another.
ARG TORCH=torch==2.13.0
ARG INDEX
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir --constraint requirements.lock ${INDEX:+--index-url "$INDEX"} "$TORCH" \
    && .venv/bin/python -m pip install --no-cache-dir --no-deps --requirement requirements.lock
COPY flashflow flashflow
COPY launch launch
COPY configs configs
RUN .venv/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . && touch .venv/.ready

ENV PATH=/work/.venv/bin:$PATH PYTHONUNBUFFERED=1
ENTRYPOINT ["flashflow"]
CMD ["--help"]
