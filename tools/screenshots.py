"""Takes a picture of the README and of pages of the documentation in headless Chromium, and checks them.

    mkdocs build
    python -m tools.screenshots --output runs/screenshots [PAGE ...]

A page is a path in docs, without `.md`. Each page must load all its images and must not be wider than its window, in a
window of a desktop and in one of a phone.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from markdown import markdown
from PIL import Image

from megatron.context_parallel import UsageError
from megatron.context_parallel.cli.run_main import run_main

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
PAGES = ("index", "choose", "strategies", "reproduction", "memory")
WINDOWS = {"desktop": 1200, "phone": 500}  # pixels; Chromium makes no narrower window
HEIGHT = 2400
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FRAME = """<!doctype html><meta charset="utf-8"><title>README</title>
<style>body {{font: 16px/1.5 sans-serif; max-width: 900px; margin: auto; padding: 1em}} img {{max-width: 100%}}
table {{display: block; overflow-x: auto; border-collapse: collapse}} td, th {{border: 1px solid #ddd; padding: .3em}}
pre {{background: #f5f5f5; padding: 1em; overflow-x: auto}}</style>{}"""
# An image below the window is not loaded by itself if it is lazy.
PROBE = """<pre id="probe" hidden></pre><script>addEventListener("load", () => {
const broken = [...document.images].filter(image => image.loading != "lazy" && !image.naturalWidth);
const page = document.documentElement;
document.getElementById("probe").textContent = JSON.stringify(
    {broken: broken.map(image => image.getAttribute("src")), wider: Math.max(0, page.scrollWidth - page.clientWidth)});
});</script>"""


def browse(browser: str, page: Path, width: int, *flags: str) -> str:
    """Standard output of Chromium for one page."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        command += [f"--window-size={width},{HEIGHT}", "--virtual-time-budget=3000", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def render_readme(folder: Path) -> Path:
    """The README as a page beside its images."""
    text = markdown((ROOT / "README.md").read_text(), extensions=["tables", "fenced_code"])
    page = folder / "README.html"
    page.write_text(FRAME.format(text.replace('src="docs/', f'src="{(ROOT / "docs").as_uri()}/')))
    return page


def check(browser: str, page: Path, name: str, output: Path) -> list[str]:
    """Writes the pictures of a page, and returns what is wrong with it."""
    faults = []
    for window, width in WINDOWS.items():
        picture = output / f"{name}-{window}.png"
        browse(browser, page, width, f"--screenshot={picture}")
        with Image.open(picture) as image:
            if image.convert("L").getextrema()[0] > 128:
                faults.append(f"{name}, {window}: nothing is drawn")
        probed = page.with_name(f"{page.stem}.probe.html")
        probed.write_text(page.read_text() + PROBE)
        dump = browse(browser, probed, width, "--dump-dom")
        probed.unlink()
        found = re.search(r'<pre id="probe" hidden="">(.*?)</pre>', dump)
        if not found or found[1] != '{"broken":[],"wider":0}':
            faults.append(f"{name}, {window}: {found[1] if found else 'the page did not load'}")
    return faults


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("pages", nargs="*", default=PAGES, metavar="PAGE", help=f"default: {' '.join(PAGES)}")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the pictures")
    args = parser.parse_args(argv)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UsageError(f"screenshots: no browser; install one of {', '.join(BROWSERS)}")
    for page in args.pages:
        if not (SITE / f"{page}.html").is_file():
            raise UsageError(f"{page}: {SITE} has no such page; run `mkdocs build`, or name one such as index")
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        faults = check(browser, render_readme(Path(folder)), "README", args.output)
    for page in args.pages:
        faults += check(browser, SITE / f"{page}.html", page, args.output)
    if faults:
        raise UsageError("screenshots: " + "\n".join(faults))
    print(f"{1 + len(args.pages)} pages are drawn whole: {args.output}")


if __name__ == "__main__":
    run_main(main)
