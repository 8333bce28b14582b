"""Clients of others, each by its own command or package, unmodified: `bash tests/serving/clients.sh` installs them.

$CLIENTS and $VLLM are the folders of their programs. A test is skipped if its client is not there.
"""

import json
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.support import llama_case
from tests.support.chatty import Chatty
from tests.support.server_case import TEXT, serving

SECONDS = 240
pytestmark = pytest.mark.skipif(
    not {"CLIENTS", "VLLM"} & os.environ.keys(), reason="no clients: run bash tests/serving/clients.sh"
)


@pytest.fixture(scope="module")
def port():
    with serving(Chatty, most=64, size=4000) as (_, number, _):
        yield number


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer with a token for each byte, like the server's."""
    path = tmp_path_factory.mktemp("tokenizer")
    llama_case.save_tokenizer(path, chat=False)
    return path


def run(variable: str, program: str, *words: str, cwd: Path | None = None) -> str:
    """What a client prints."""
    found = shutil.which(program, path=os.environ.get(variable, ""))
    if not found:
        pytest.skip(f"{program}: not installed; run bash tests/serving/clients.sh, or set {variable} to its folder")
    settings = {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    settings |= {"PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [found, *words], env=os.environ | settings, cwd=cwd, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def script(source: str, *words: str) -> str:
    return run("CLIENTS", "python", "-c", textwrap.dedent(source), *words)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(port, folder, tmp_path, backend):
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    words = f"bench serve --backend {backend} --endpoint {path} --base-url http://127.0.0.1:{port} --model parrot"
    words += f" --tokenizer {folder} --dataset-name random --random-input-len 20 --random-output-len 9"
    words += " --num-prompts 12 --ignore-eos --save-result --result-filename result.json"
    run("VLLM", "vllm", *words.split(), cwd=tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 12 and not result.get("failed") and result["total_output_tokens"] == 12 * 9
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0


TASK = """
task: parrot
dataset_path: json
dataset_kwargs: {data_files: {test: data.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
"""
GENERATED = """
task: parrot_text
dataset_path: json
dataset_kwargs: {data_files: {test: data.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
target_delimiter: ""
generation_kwargs: {until: [":"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
"""


def test_lm_eval(port, folder, tmp_path):
    """Likelihoods of choices, and texts."""
    (tmp_path / "parrot.yaml").write_text(TASK)
    (tmp_path / "parrot_text.yaml").write_text(GENERATED)
    one = {"question": "said", "choices": ["hello", TEXT[:8], "world"], "answer": 1, "text": "Größe"}
    (tmp_path / "data.json").write_text("\n".join([json.dumps(one), json.dumps(one | {"answer": 0, "text": "no"})]))
    model = f"model=parrot,base_url=http://127.0.0.1:{port}/v1/completions,tokenizer={folder},tokenized_requests=False"
    words = (
        f"--model local-completions --tasks parrot,parrot_text --include_path {tmp_path} --output_path {tmp_path}/out"
    )
    run("CLIENTS", "lm_eval", *words.split(), "--model_args", model, cwd=tmp_path)
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert (results["parrot"]["acc,none"], results["parrot_text"]["exact_match,none"]) == (0.5, 0.5)


LITELLM = """
    import sys
    from litellm import completion, text_completion

    at = {"api_base": f"http://127.0.0.1:{sys.argv[1]}/v1", "api_key": "none"}
    said = [{"role": "developer", "content": "12"}, {"role": "user", "content": [{"type": "text", "text": "34"}]}]
    for model in ("openai/parrot", "hosted_vllm/parrot"):
        more = {"max_tokens": 7, "temperature": 0, "presence_penalty": 0, "metadata": {"a": "b"}, "user": "me"}
        print(completion(model=model, messages=said, **more, **at).choices[0].message.content)
        stream = completion(model=model, messages=said, stream=True, **more, **at)
        print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
    done = text_completion(model="text-completion-openai/parrot", prompt="1234", max_tokens=7, logprobs=3, **at)
    print(done.choices[0].text)
"""


def test_litellm(port):
    assert script(LITELLM, str(port)).split() == ["Größe"] * 5


LANGCHAIN = """
    import sys
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI, OpenAI

    at = {"base_url": f"http://127.0.0.1:{sys.argv[1]}/v1", "api_key": "none", "model": "parrot", "temperature": 0}
    chat = ChatOpenAI(**at, max_tokens=7, logprobs=True, top_logprobs=2, metadata={"a": "b"})
    said = [SystemMessage("1"), HumanMessage("2"), AIMessage("3"), HumanMessage("4")]
    answer = chat.invoke(said)
    print(answer.content)
    print("".join(chunk.content for chunk in chat.stream(said)))

    def look(at: str) -> str:
        "Look at something."

    print(chat.bind_tools([look]).invoke(said).content)
    print(OpenAI(**at, max_tokens=7).invoke("1234"))
    assert answer.usage_metadata["output_tokens"] == 7 and len(answer.response_metadata["logprobs"]["content"]) == 7
"""


def test_langchain(port):
    assert script(LANGCHAIN, str(port)).split() == ["Größe"] * 4


FIELDS = """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for kind in (CompletionRequest, ChatCompletionRequest):
        print(*kind.model_fields)
"""


def test_fields_of_vllm_are_known():
    from megatron.context_parallel.serving.fields import IGNORED, NEUTRAL
    from megatron.context_parallel.serving.protocol import Chat, Completion

    lines = run("VLLM", "python", "-c", textwrap.dedent(FIELDS)).strip().splitlines()[-2:]
    for kind, line in zip((Completion, Chat), lines, strict=True):
        assert not {*line.split()} - kind.model_fields.keys() - NEUTRAL.keys() - IGNORED
