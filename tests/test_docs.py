"""The code in the documentation runs as it stands."""

import re
from pathlib import Path

import pytest

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


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page}: {target}"
