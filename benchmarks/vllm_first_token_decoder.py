"""vLLM's part of vllm_first_token.py, in vLLM's environment."""

import json
import os
import sys
import time
from pathlib import Path
from random import Random

from tests.vllm.decode import counts, decode, difference, start
from tests.vllm.servers import ticket


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    host, port = os.environ["PREFILL"].split(":")
    llm = start(Path(job["model"]), 1, 128, silence=60, max_model_len=2 * job["tokens"][-1])
    draw = Random(1)

    def time_first_token(tokens: int, prefilled: bool) -> float:
        prompt = draw.choices(range(3, 259), k=tokens)
        before, begin = counts(llm), time.perf_counter()
        decode(llm, [prompt], [ticket(int(port), prompt, host) if prefilled else None], 1)
        seconds = time.perf_counter() - begin
        fetched = difference(counts(llm), before).get("external_kv_transfer", 0)
        assert fetched == tokens * prefilled, fetched
        return seconds

    found = {"alone": [], "prefilled": []}
    for tokens in job["tokens"]:
        for kind, times in found.items():
            time_first_token(tokens, kind == "prefilled")  # warms up
            times.append([time_first_token(tokens, kind == "prefilled") for _ in range(job["rounds"])])
    Path(job["results"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
