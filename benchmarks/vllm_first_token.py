"""Times the first token of a long prompt: by vLLM alone, and by vLLM after a prefill by n of our ranks.

Each rank and vLLM have a node of an emulated cluster, with a NIC of the given rate. They share the processors of this
machine. Weights are random. vLLM's environment is that of tests/vllm/install.sh:

    sudo -E PYTHONPATH=. python benchmarks/vllm_first_token.py --vllm build/vllm --counts 1 2 4 --node-rate 100mbit \
        --tokens 8192 --output runs/vllm
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.context_parallel.cli.run_main import announce, run_main
from megatron.context_parallel.cli.tables import show
from tests.support.llama_case import save_tokenizer
from tools.netlab import Lab, exits_as_ranks_did

RANK = Path(__file__).with_name("vllm_first_token_rank.py")
SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 259}
BYTES = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4  # of a token, float32


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="folder of vLLM's environment")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4], help="numbers of prefill ranks")
    parser.add_argument("--node-rate", default="100mbit", help="rate of each NIC")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    return parser.parse_args(argv)


def measure(given: argparse.Namespace, ranks: int, model: Path, folder: Path) -> dict:
    """Seconds to the first token of each round, alone and after a prefill by `ranks` ranks."""
    job = {
        "model": str(model),
        "vllm": str(Path(given.vllm).absolute() / "bin/python"),
        "tokens": given.tokens,
        "rounds": given.rounds,
        "ranks": ranks,
        "results": str(folder / f"results{ranks}.json"),
    }
    (folder / "job.json").write_text(json.dumps(job))
    with Lab(ranks + 1, 1, given.node_rate, name=f"bench{os.getpid()}") as lab:
        lab.run([RANK, folder / "job.json"])
        described = lab.describe()
    return json.loads(Path(job["results"]).read_text()) | {"ranks": ranks, "cluster": described}


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> None:
    given = parse_args(argv)
    table = Table("prefill ranks", "vLLM alone (s)", "with prefill (s)", "rows (MB)", "rows at the NIC's rate (s)")
    results = []
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        positions = 2 * given.tokens
        config = AutoConfig.for_model("llama", **SIZES, max_position_embeddings=positions)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        save_tokenizer(model, chat=False)
        for ranks in given.counts:
            announce(f"{ranks} ranks and vLLM, each with a NIC of {given.node_rate}")
            found = measure(given, ranks, model, Path(name))
            results.append(found)
            size = given.tokens * BYTES
            alone, prefilled = (statistics.median(found[kind]) for kind in ("alone", "prefilled"))
            rate = found["cluster"]["rate_bits_per_second"] / 8
            table.add_row(str(ranks), f"{alone:.2f}", f"{prefilled:.2f}", f"{size / 1e6:.1f}", f"{size / rate:.2f}")
    (given.output / "vllm_first_token.json").write_text(json.dumps(results, indent=1))
    show(table)


if __name__ == "__main__":
    run_main(main)
