# The GPU environment: PyTorch's image with the torch that requirements.txt pins, and the attention libraries that
# `--cp-attention-backend auto` takes first on A100, H100 and B200.
#   docker build -t megatron-context-parallel .
# Checked with hadolint and pip's resolver; not built yet. Another BASE must bring that torch, nvcc, NCCL and cuDNN.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}

ARG FLASH_ATTN=2.8.3.post2
# flash-attn 3 has no releases: its last change, which builds with CUDA 13.
ARG FLASH_ATTN_3=c75d019dea9d910312974417bc28f190dfdda6d9
# For linears and norms; megatron-core 0.16.1 asks for 2.9 to 2.11.
ARG TRANSFORMER_ENGINE=2.11.0
# apex's last release, 25.09, also compiles for sm_70, which CUDA 13 does not have.
ARG APEX=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG MAX_JOBS=8
# Each build reads a variable of its own: flash-attn 2 the first, Transformer Engine the second, apex the third,
# flash-attn 3 none (it is for sm_90).
ARG FLASH_ATTN_CUDA_ARCHS="80;90;100"
ARG NVTE_CUDA_ARCHS="80;90;100"
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
# The image's Python is Debian's, where pip asks for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1

# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/megatron-context-parallel
COPY requirements.txt .
RUN pip install -r requirements.txt transformers==5.23.0 sentencepiece==0.2.3 wandb==0.31.0 \
    ninja==1.13.0 packaging wheel

RUN pip install --no-build-isolation "flash-attn==${FLASH_ATTN}"
# Without what is never called: other GPUs, fp8, caches, split keys, values of another head_dim.
RUN FLASH_ATTENTION_DISABLE_SM80=TRUE FLASH_ATTENTION_DISABLE_FP8=TRUE FLASH_ATTENTION_DISABLE_PAGEDKV=TRUE \
    FLASH_ATTENTION_DISABLE_APPENDKV=TRUE FLASH_ATTENTION_DISABLE_SPLIT=TRUE FLASH_ATTENTION_DISABLE_HDIMDIFF64=TRUE \
    FLASH_ATTENTION_DISABLE_HDIMDIFF192=TRUE pip install --no-build-isolation \
    "flash_attn_3 @ git+https://github.com/Dao-AILab/flash-attention.git@${FLASH_ATTN_3}#subdirectory=hopper"
# Its build includes headers of cuDNN and NCCL, which are in the packages that torch brings.
RUN CPATH="$(python3 -c 'import glob, sysconfig; \
    print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/include")))')" \
    pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==${TRANSFORMER_ENGINE}"
# From NVIDIA's repository: the package of this name on PyPI is something else.
RUN APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation \
    "apex @ git+https://github.com/NVIDIA/apex.git@${APEX}"

COPY . .
RUN pip install --no-deps --editable .
