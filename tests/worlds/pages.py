"""The commands of a how-to page, run word for word where its reader would type them."""

import os
import re
import sys
from pathlib import Path

from tests.worlds.programs import run_launcher

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_of(name):
    """Of a how-to page: its files {title: text}, and its other shell blocks, in order."""
    text = (ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8")
    blocks = _BLOCK.findall(text)
    files = {title: code for _, title, code in blocks if title}
    return files, [code for language, title, code in blocks if language == "sh" and not title]


def run_in(folder, files, script, *, path=(), timeout=120, prefix=(), **variables):
    """Run a shell script in a folder with the page's files; `python` is this environment's."""
    for title, code in files.items():
        (folder / title).write_text(code, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    folders = [str(Path(sys.executable).parent), *path, os.environ["PATH"]]
    environment = {"PATH": os.pathsep.join(folders), "PYTHONPATH": str(ROOT)} | variables
    line = f"set -eu; cd '{folder}'; {script}"
    command = [*prefix, line] if prefix else ["bash", "-c", line]
    return run_launcher(command, environment, timeout=timeout)
