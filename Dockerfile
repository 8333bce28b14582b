# The GPU environment: NVIDIA's PyTorch image with the released libraries this project works beside.
#   docker build -t megatron-context-parallel .
# Assumed, not tested here: the base image brings torch, CUDA's compiler, NCCL and cuDNN; its torch is kept.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}

# What the base image fixes (torch, numpy, its own transformer-engine) stays as it is.
ARG MEGATRON_CORE=0.16.1
ARG TRANSFORMER_ENGINE=2.9.0
ARG FLASH_ATTN=2.8.3
ARG APEX=25.04
# Compile for these GPUs only: A100 and H100.
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0"
ARG MAX_JOBS=8

RUN pip install --no-cache-dir --no-build-isolation "transformer-engine[pytorch]==${TRANSFORMER_ENGINE}"
RUN pip install --no-cache-dir --no-build-isolation "flash-attn==${FLASH_ATTN}"
# From NVIDIA's repository: the package of this name on PyPI is something else.
RUN pip install --no-cache-dir --no-build-isolation \
    --config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" \
    "apex @ git+https://github.com/NVIDIA/apex.git@${APEX}"
RUN pip install --no-cache-dir "megatron-core==${MEGATRON_CORE}" psutil pyyaml matplotlib rich tensorboard xxhash \
    transformers sentencepiece wandb

WORKDIR /workspace/megatron-context-parallel
COPY . .
RUN pip install --no-cache-dir --no-deps --editable .
