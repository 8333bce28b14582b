"""The code in the documentation runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import training_case

from megatron.context_parallel.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]


def code(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.mark.parametrize("page", ["README.md", "docs/writing_a_strategy.md"])
def test_examples_run(page, tmp_path, monkeypatch):
    source = code(page)
    assert source
    monkeypatch.chdir(tmp_path)
    before = dict(STRATEGIES)
    try:
        exec(compile(source, page, "exec"), {"__name__": "example"})
    finally:
        STRATEGIES.clear()
        STRATEGIES.update(before)


def train_alone(family: str) -> training_case.Recorder:
    return training_case.train(family, train_iters=5)


def train_from_a_file(family: str, path: Path) -> training_case.Recorder:
    spread = {"context_parallel_size": 4, "cp_strategy": f"{path}:tokenring", "cp_layout": "cyclic"}
    return training_case.train(family, train_iters=5, **spread)


def test_documented_strategy_is_short_and_trains(ranks, tmp_path):
    first = re.search(r"```python\n(.*?)```", (ROOT / "docs/writing_a_strategy.md").read_text(), re.DOTALL)[1]
    logic = [line for line in first[first.index("def tokenring") :].splitlines() if line.strip()]
    assert len(logic) <= 15
    path = tmp_path / "tokenring.py"
    path.write_text(first)
    (alone,) = ranks(1, train_alone, "gpt3")
    for run in ranks(4, train_from_a_file, "gpt3", path):
        assert run.losses == pytest.approx(alone.losses, rel=1e-5)


def test_strategies_of_installed_packages_are_found(tmp_path):
    (tmp_path / "my_strategies.py").write_text(
        code("docs/writing_a_strategy.md").split("from megatron.context_parallel.plan.verify")[0]
    )
    description = tmp_path / "my_strategies-1.0.dist-info"
    description.mkdir()
    (description / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    toml = re.search(r"```toml\n(.*?)```", (ROOT / "docs/writing_a_strategy.md").read_text(), re.DOTALL)[1]
    group, line = toml.splitlines()
    name = group.split('"')[1]
    (description / "entry_points.txt").write_text(f"[{name}]\n" + line.replace('"', "") + "\n")
    program = "from megatron.context_parallel import STRATEGIES; print(*STRATEGIES)"
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": path}, check=True
    )
    assert {"tokenring", "skipring"} <= {*done.stdout.split()}


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page}: {target}"
