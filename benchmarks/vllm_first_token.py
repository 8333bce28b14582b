"""Times the first token of prompts: by vLLM alone, and by vLLM after a prefill by n of our ranks.

Each rank and vLLM have a node of an emulated cluster, with one thread and a NIC of the given rate. They share the
processors of this machine. Weights are random. vLLM's environment is that of tests/vllm/install.sh:

    sudo -E PYTHONPATH=. python benchmarks/vllm_first_token.py --vllm build/vllm --counts 1 2 4 --node-rate 500mbit \
        --tokens 128 2048 8192 --output runs/vllm
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
# At 8192 tokens, attention has a sixth of the operations, about as in Llama 3.1 8B.
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 259}
BYTES = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 4  # of a token, float32


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="folder of vLLM's environment")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4], help="numbers of prefill ranks")
    parser.add_argument("--node-rate", default="500mbit", help="rate of each NIC")
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 2048, 8192], help="lengths, ascending")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each length and kind")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    return parser.parse_args(argv)


def measure(given: argparse.Namespace, ranks: int, model: Path, folder: Path) -> dict:
    """Seconds to the first token of each length and round, alone and after a prefill by `ranks` ranks."""
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


def break_even(lengths: list[int], alone: list[float], prefilled: list[float]) -> tuple[float | None, float | None]:
    """The length from which a handoff pays: predicted, and measured. None: it does not pay at any length.

    The prediction knows the delay of a handoff from the shortest prompts, and both rates from the longest ones. The
    measured length is between two of the given ones, on the line between their differences.
    """
    delay = prefilled[0] - alone[0]
    gain = (alone[-1] - (prefilled[-1] - delay)) / lengths[-1]  # seconds per token
    predicted = delay / gain if gain > 0 else None
    ahead = [one - other for one, other in zip(prefilled, alone, strict=True)]
    for i in range(1, len(lengths)):
        if ahead[i - 1] > 0 >= ahead[i]:
            part = ahead[i - 1] / (ahead[i - 1] - ahead[i])
            return predicted, lengths[i - 1] + part * (lengths[i] - lengths[i - 1])
    return predicted, None


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> None:
    given = parse_args(argv)
    columns = ("prefill ranks", "tokens", "vLLM alone (s)", "with prefill (s)", "rows at the NIC's rate (s)")
    table, lengths = Table(*columns), Table("prefill ranks", "break-even predicted (tokens)", "measured")
    results = []
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        positions = 2 * given.tokens[-1]
        config = AutoConfig.for_model("llama", **SIZES, max_position_embeddings=positions)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        save_tokenizer(model, chat=False)
        for ranks in given.counts:
            announce(f"{ranks} ranks and vLLM, each with a NIC of {given.node_rate}")
            found = measure(given, ranks, model, Path(name))
            results.append(found)
            medians = {kind: [statistics.median(x) for x in found[kind]] for kind in ("alone", "prefilled")}
            rate = found["cluster"]["rate_bits_per_second"] / 8
            for tokens, alone, prefilled in zip(given.tokens, *medians.values(), strict=True):
                seconds = f"{alone:.2f}", f"{prefilled:.2f}", f"{tokens * BYTES / rate:.2f}"
                table.add_row(str(ranks), str(tokens), *seconds)
            pays = [f"{x:.0f}" if x else "none" for x in break_even(given.tokens, *medians.values())]
            lengths.add_row(str(ranks), *pays)
    (given.output / "vllm_first_token.json").write_text(json.dumps(results, indent=1))
    show(table)
    show(lengths)


if __name__ == "__main__":
    run_main(main)
