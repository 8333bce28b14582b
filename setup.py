from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-context-parallel",
    version="0.1.0",
    description="Every context-parallel attention of the literature behind one Megatron flag",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # megatron/ is a namespace package: this one installs beside the released megatron-core.
    packages=find_namespace_packages(include=["megatron.context_parallel*"]),
    package_data={
        "megatron.context_parallel.plan": ["page.html"],
        "megatron.context_parallel.trainer": ["presets/*.yaml"],
    },
    install_requires=[
        "torch>=2.6",
        "megatron-core==0.16.1",
        "psutil",  # megatron-core's asynchronous checkpoint writer imports it without declaring it
        "pyyaml",
        "matplotlib",
        "rich",
        "tensorboard",
    ],
    extras_require={
        "tokenizers": ["transformers", "sentencepiece"],
        "wandb": ["wandb"],
        "dev": ["pytest", "ruff", "pre-commit"],
    },
)
