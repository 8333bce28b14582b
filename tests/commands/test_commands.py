"""The installed package: errors are one line, the core needs only torch and numpy, versions are declared once."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from megatron.context_parallel import UsageError
from megatron.context_parallel.cli import run_main as run
from megatron.context_parallel.commands import programs
from megatron.context_parallel.patches import megatron_experts, torch_process_groups

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ending(monkeypatch, capsys, main) -> tuple[int | None, str]:
    """Exit status and stderr of a program named cp-try."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/cp-try"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as leaving:
        run.run_main(main)
    return leaving.value.code, capsys.readouterr().err


def failing(error: Exception):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "status", "told"),
    [
        (lambda: None, None, ""),
        (lambda: 3, 3, ""),
        (failing(UsageError("--ranks 0: need at least 1")), 2, "cp-try: error: --ranks 0: need at least 1\n"),
        (
            failing(ModuleNotFoundError(name="megatron.core.models")),
            2,
            "cp-try: error: needs megatron-core: pip install 'megatron-context-parallel[train]'\n",
        ),
        (
            failing(ModuleNotFoundError(name="wandb")),
            2,
            "cp-try: error: needs wandb: pip install 'megatron-context-parallel[wandb]'\n",
        ),
    ],
)
def test_how_a_program_ends(main, status, told, monkeypatch, capsys):
    assert ending(monkeypatch, capsys, main) == (status, told)


@pytest.mark.parametrize("name", ["megatron.context_parallel.plans", "richer"])
def test_what_no_extra_brings_is_a_fault_of_ours(name):
    with pytest.raises(ModuleNotFoundError):
        run.run_main(failing(ModuleNotFoundError(name=name)))


def test_a_program_with_triton_ends_without_its_complaints():
    pytest.importorskip("triton")
    program = """
from megatron.context_parallel.cli.run_main import imports, run_main

def main():
    with imports():
        import triton

run_main(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_release_that_lacks_a_name_is_told_in_one_line(monkeypatch, capsys):
    lacking = failing(ImportError("cannot import name 'is_checkpointing'", name="megatron.core.tensor_parallel.random"))
    for old in ("0.15.3", "0.9.0", "0.20.0rc1"):
        monkeypatch.setattr(run.metadata, "version", {"megatron-core": old}.get)
        told = f"cp-try: error: megatron-core {old}: not supported; install megatron-core 0.16 to 0.19\n"
        assert ending(monkeypatch, capsys, lacking) == (2, told)
    monkeypatch.setattr(run.metadata, "version", {"megatron-core": "0.19.2"}.get)
    with pytest.raises(ImportError, match="is_checkpointing"):
        run.run_main(lacking)


def test_every_console_script_is_a_command_whose_examples_work():
    for script, target in PROJECT["scripts"].items():
        module, name = target.split(":")
        assert (module, script) == (programs.__name__, "cp-" + name.replace("_", "-"))
        command = import_module(f"{programs.__package__}.{name}")
        assert callable(getattr(programs, name)) and callable(command.main)
        if hasattr(command, "PARSER"):
            for flag in command.PARSER.flags.values():
                assert flag.kind is bool or flag.parse(str(flag.example)) is not None, flag.option
            for words in command.PARSER.examples:
                command.PARSER.parse(shlex.split(words))
                assert f" {words}".rstrip() + "\n" in command.PARSER.help("all")


def test_help_names_the_program_that_runs(monkeypatch, capsys):
    plot_loss = import_module(f"{programs.__package__}.plot_loss")
    for program, named in (("/usr/bin/cp-plot-loss", "cp-plot-loss"), ("tools/plot.py", "python tools/plot.py")):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(SystemExit):
            plot_loss.main(["--help"])
        assert capsys.readouterr().out.startswith(f"usage: {named} RUN_DIR\n")


def test_a_command_runs_as_a_module_too(monkeypatch):
    """`python -m megatron.context_parallel.commands.plan` is `cp-plan`."""
    for name in [target.split(":")[1] for target in PROJECT["scripts"].values()]:
        monkeypatch.setattr(programs, name, lambda name=name: sys.exit(name))
        module = import_module(f"{programs.__package__}.{name}")
        with pytest.raises(SystemExit, match=f"^{name}$"):
            runpy.run_path(module.__file__, run_name="__main__")


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9-]+", line)[0].lower() for line in requirements}


def test_extras_bring_what_commands_import_and_pins_are_complete():
    extras = {extra: names(lines) for extra, lines in PROJECT["optional-dependencies"].items()}
    extras["train"] |= extras["megatron"]
    for package, extra in run.NEEDS.values():
        assert package in extras[extra], package
    pinned = names((ROOT / "requirements.txt").read_text().split())
    tokenizer = {"sentencepiece"}  # of the quickstart
    assert pinned == names(PROJECT["dependencies"]) | extras["train"] - {PROJECT["name"]} | tokenizer
    assert "megatron-core>=0.16.0,<0.20" in PROJECT["optional-dependencies"]["megatron"]
    assert run.TESTED["megatron-core"] == megatron_experts.CHECKED["megatron-core"]
    assert run.TESTED["torch"] == torch_process_groups.CHECKED["torch"]


LIGHT = """
import sys
from megatron.context_parallel.commands import programs
for name in {names!r}:
    for words in {runs!r}:
        sys.argv = ["/usr/bin/cp-" + name, *words.split()]
        try:
            getattr(programs, name)()
        except SystemExit as leaving:
            print(leaving.code)
print(sorted({heavy!r} & set(sys.modules)))
"""


def started(runs: list[str], heavy: set[str], *names: str) -> subprocess.CompletedProcess:
    """Programs with each of these flags in one process, which then prints what it imported of `heavy`."""
    command = [sys.executable, "-c", LIGHT.format(runs=runs, heavy=heavy, names=names)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_help_and_wrong_flags_do_not_wait_for_torch(tmp_path):
    (tmp_path / "run.yaml").write_text("num-layers: many")
    tiny = "--preset tiny-llama --micro-batch-size 1 --dry-run"
    wrong = {
        "--help modle": "--help modle: unknown; choose all or run or model",
        "--num-layer 4": "--num-layer: unknown flag",
        "--num-layers four": "--num-layers four: need a whole number",
        "--lr -1": "--lr -1: need a number, above 0",
        "--preset llama": "--preset llama: unknown",
        f"--config {tmp_path}/run.yaml": "run.yaml: --num-layers many",
        "--dry-run --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1": "--num-layers: miss",
        f"{tiny} --save-interval 5": "needs --save DIR",
        f"{tiny} --bf16 --fp16": "cannot be combined with --bf16",
        f"{tiny} --cp-strategy circle": "--cp-strategy circle: unknown",
        f"{tiny} --cp-strategy ring:tile=2": "no option tile",
        f"{tiny} --cp-strategy mesh --cp-grid square": "--cp-grid square: need two whole numbers",
        f"{tiny} --cp-overlap": "not an option of ring",
    }
    done = started(["--help all", *wrong], {"torch", "numpy", "megatron.core", "rich"}, "pretrain")
    assert "usage: torchrun --nproc-per-node N --no-python cp-pretrain [--preset NAME]" in done.stdout
    assert "pretrain_gpt" not in done.stdout
    assert done.stdout.splitlines()[-len(wrong) - 2 :] == ["0", *["2"] * len(wrong), "[]"], done.stderr
    for line, part in zip(done.stderr.splitlines(), wrong.values(), strict=True):
        assert line.startswith("cp-pretrain: error: ") and part in line


def test_generation_does_not_wait_for_torch_either(tmp_path):
    (tmp_path / "empty.txt").touch()
    wrong = {
        "generate": {
            "--prompt a": "--load: missing; give --load runs/quickstart",
            "--load runs": "--prompt: missing; give --prompt",
            "--load runs --prompt a --interactive": "--prompt a: cannot be combined with --interactive",
            f"--load runs --prompts-file {tmp_path}/none.txt": "none.txt: cannot be read",
            f"--load runs --prompts-file {tmp_path}/empty.txt": "contains no prompts",
            "--load runs --prompt a --top-p 1.5": "--top-p 1.5: need a number, 0 or more, 1 at most",
            "--load runs --prompt a --temprature 1": "did you mean --temperature?",
            "--load runs --prompt a --cp-strategy own.py:own": "--cp-strategy: not a flag of this command; inference",
            f"--load {tmp_path} --prompt a": "contains neither checkpoints of a run nor a HuggingFace model",
        },
        "run_text_generation_server": {
            "--port 70000 --load runs": "--port 70000: need a whole number, 0 or more, 65535 at most",
            f"--load runs --api-key-file {tmp_path}/none.txt": "none.txt: cannot be read",
            f"--load runs --api-key-file {tmp_path}/empty.txt": "contains no key",
            "--load runs --context-parallel-size 4": "command; all ranks share the sequences",
        },
    }
    for program, mistakes in wrong.items():
        done = started(["--help", *mistakes], {"torch", "numpy", "megatron.core", "starlette"}, program)
        assert "--inference-dynamic-batching-max-tokens N" in done.stdout
        assert done.stdout.splitlines()[-len(mistakes) - 2 :] == ["0", *["2"] * len(mistakes), "[]"], done.stderr
        for line, part in zip(done.stderr.splitlines(), mistakes.values(), strict=True):
            assert line.startswith(f"cp-{program}: error: ") and part in line


def test_other_commands_do_not_wait_for_it_either():
    names = ["calibrate", "checkpoint", "cluster_probe", "convert_hf", "gpu_check", "plan", "plan_search"]
    names += ["plot_loss", "preprocess_data", "stuck"]
    done = started(["--help", "--no-such-flag"], {"torch", "megatron.core", "transformers", "matplotlib"}, *names)
    first = {line.split(":")[0]: line for line in reversed(done.stderr.splitlines())}  # missing flags follow
    for name, line in zip(names, reversed(first.values()), strict=True):
        assert line.startswith(f"cp-{name}: error: --no-such-flag: unknown flag; --help lists the flags, such as ")
    assert done.stdout.count("examples:\n  ") == len(names) and done.stdout.endswith("\n[]\n")


def test_a_dry_run_needs_no_ranks_and_imports_nothing_of_training():
    heavy = {"megatron.core", "transformers", "tensorboard", "matplotlib", "triton", "torch.utils.tensorboard"}
    done = started(
        ["--preset llama2-7b --context-parallel-size 8 --micro-batch-size 1 --bf16 --dry-run"], heavy, "pretrain"
    )
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("assuming 8 ranks", "[0,1,2,3,4,5,6,7]", "6,738,415,616 parameters", "12.55 GiB"):
        assert part in done.stdout
    assert "512 per context rank" in done.stdout and done.stdout.endswith("\n[]\n")


CORE = f"""
import sys
for name in {sorted({name.split(".")[0] for name in run.NEEDS} - {"megatron"})} + ["megatron.core", "scipy", "triton"]:
    sys.modules[name] = None  # importing it is an error
import torch
from megatron.context_parallel import AllRanks, context_parallel_attention
q = torch.randn(16, 1, 2, 8, requires_grad=True)
context_parallel_attention(q, q, q, AllRanks(2, "mesh")).sum().backward()
print(q.grad.shape)
"""


def test_the_core_needs_torch_and_numpy_alone():
    done = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "torch.Size([16, 1, 2, 8])\n", done.stderr
