"""Compares our server on 1 and 2 ranks with vLLM on CPU: output tokens per second and time to the first token.

All servers run at once and are asked in turn, by `vllm bench serve`: 128 tokens in, 64 out, greedy. Weights are random.
A rank, and vLLM's worker, have one thread. vLLM's environment is that of tests/vllm/install.sh:

    bash tests/vllm/install.sh build/vllm
    PYTHONPATH=. python benchmarks/vllm_serve.py --vllm build/vllm
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron.context_parallel.cli.run_main import announce, run_main
from megatron.context_parallel.cli.tables import show
from tests.vllm.servers import Server, free_port

NEW, PROMPT, VOCABULARY = 64, 128, 32_000
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
SETTINGS |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
VLLM = "vLLM"


def save_model(folder: Path) -> None:
    """Random weights, and a tokenizer with a text for each token."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number}" for number in range(VOCABULARY - 1 - len(words))]
    known = {"</s>": 0} | {word: 1 + place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(known, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def start(stack: ExitStack, folder: Path, vllm: Path, ranks: int) -> Server:
    """Our server of so many ranks, or vLLM's (0)."""
    port, model = free_port(), str(folder / "model")
    served = ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    if ranks:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words += ["tools/run_text_generation_server.py", "--load", model, "--cache-tokens", "8192", *served]
    else:
        words = [str(vllm / "bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        words += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", *served]
    return Server(words, port, folder / f"server{ranks}.log", stack)


def measure(server: Server, folder: Path, vllm: Path, at_once: int, prompts: int) -> tuple[float, float]:
    """Output tokens per second, and the mean milliseconds to the first token."""
    words = f"bench serve --backend openai --base-url http://127.0.0.1:{server.port} --model model"
    words += f" --tokenizer {folder}/model --dataset-name random --random-input-len {PROMPT} --random-output-len {NEW}"
    words += f" --num-prompts {prompts} --max-concurrency {at_once} --num-warmups {at_once} --ignore-eos"
    words += f" --temperature 0 --disable-tqdm --save-result --result-dir {folder} --result-filename result.json"
    program = [str(vllm / "bin/python"), str(vllm / "bin/vllm")]
    subprocess.run([*program, *words.split()], check=True, capture_output=True)
    found = json.loads((folder / "result.json").read_text())
    assert found["completed"] == prompts and found["total_output_tokens"] == NEW * prompts, found
    return found["output_throughput"], found["mean_ttft_ms"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="folder of vLLM's environment")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 16], help="requests at a time")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="ranks of our servers")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each server, in turn")
    given = parser.parse_args(argv)
    vllm = given.vllm.absolute()
    os.environ.update(SETTINGS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end too
    table = Table("at a time", "server", "output tokens/s", "ratio", "first token, ms", "ratio")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(folder / "model")
        servers = {VLLM: start(stack, folder, vllm, 0)}
        servers |= {f"ours, ranks: {n}": start(stack, folder, vllm, n) for n in given.ranks}
        for server in servers.values():
            server.wait_until_ready()
        for at_once in given.at_once:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for number in range(given.rounds):
                announce(f"{at_once} at a time, round {number + 1} of {given.rounds}")
                for name, server in servers.items():
                    found[name].append(measure(server, folder, vllm, at_once, max(6, 2 * at_once)))
            medians = {name: [statistics.median(x) for x in zip(*of, strict=True)] for name, of in found.items()}
            for name, (speed, first) in medians.items():
                ratios = f"{speed / medians[VLLM][0]:.2f}", f"{first / medians[VLLM][1]:.2f}"
                table.add_row(str(at_once), name, f"{speed:.0f}", ratios[0], f"{first:.0f}", ratios[1])
    show(table)


if __name__ == "__main__":
    run_main(main)
