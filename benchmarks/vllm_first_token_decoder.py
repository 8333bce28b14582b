"""vLLM's part of vllm_first_token.py, in vLLM's environment."""

import json
import os
import sys
import time
from pathlib import Path
from random import Random

from tests.vllm.decode import counts, decode, difference, start, ticket_of


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    model = Path(job["model"])
    llm = start(model.parent, 1, 128, model.name, length=2 * job["tokens"], silence=60)
    draw = Random(1)
    found = {"alone": [], "prefilled": []}
    for _ in range(job["rounds"] + 1):
        for kind, seconds in found.items():
            prompt = draw.choices(range(3, 259), k=job["tokens"])
            before, begin = counts(llm), time.perf_counter()
            params = ticket_of(os.environ["PREFILL"], prompt) if kind == "prefilled" else None
            decode(llm, [prompt], [params], 1)
            seconds.append(time.perf_counter() - begin)
            fetched = difference(counts(llm), before).get("external_kv_transfer", 0)
            assert fetched == (job["tokens"] if kind == "prefilled" else 0), fetched
    for seconds in found.values():
        del seconds[0]  # the first round warms up
    Path(job["results"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
