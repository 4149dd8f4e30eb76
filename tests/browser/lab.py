"""JupyterLab in headless Chromium: start it on copies of the lessons, run all cells of one, read the page."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Page, sync_playwright
from run_all import METADATA, learners_copy, store, written

from tests.programs import free_port, until

ROOT = Path(__file__).parents[2]
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# Without these Chromium looks for updates, which fails many times over where there is no network.
_QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# All cells stay in the page: the notebook otherwise shows only those that are in sight.
_SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false"},
}

# JupyterLab shows a kernel as idle before there is one, and asks which one to start if cells are run then.
_HAS_A_KERNEL = """
(name) => {
    const open = window.jupyterapp?.shell.currentWidget?.context;
    if (!open?.path.endsWith(name) || !open.isReady || !open.sessionContext.isReady) return false;
    return open.sessionContext.session?.kernel?.status === "idle";
}
"""
_RUN_ALL = '() => { window.jupyterapp.commands.execute("notebook:run-all-cells"); }'


def chromium() -> str | None:
    """The path of this machine's Chromium, or None."""
    return next((path for name in _CHROMIUM if (path := shutil.which(name))), None)


class Lab:
    """A running JupyterLab, and a browser page in it."""

    def __init__(self, page: Page, url: str, token: str, folder: Path):
        self.page, self.url, self.token, self.folder = page, url, token, folder

    def write(self, name: str, cells: list[str]) -> None:
        """A notebook of one's own beside the lessons, for `open`."""
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=METADATA)
        (self.folder / f"{name}.ipynb").write_text(nbformat.writes(notebook), encoding="utf-8")

    def open(self, lesson: str) -> None:
        """Open a lesson such as "00_start_here", alone in the window, and wait until its kernel is idle."""
        self.page.goto(f"{self.url}/lab/tree/{lesson}.ipynb?reset&token={self.token}", wait_until="domcontentloaded")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=120_000)
        self.page.wait_for_function(_HAS_A_KERNEL, arg=f"{lesson}.ipynb", timeout=120_000)

    def run_all(self, timeout: float = 180) -> None:
        """The command of the menu Run > Run All Cells, which may close before it is clicked; wait for the last cell."""
        self.start()
        self.wait_for_the_end(timeout)

    def start(self) -> None:
        """Run all cells, and do not wait."""
        self.page.evaluate(_RUN_ALL)

    def wait_for_the_end(self, timeout: float = 180) -> None:
        """Of the last cell."""
        until(lambda: all(count.strip("[]: ").isdigit() for count in self.counts() or ["none"]), timeout, every=0.5)
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=120_000)

    def counts(self) -> list[str]:
        """What stands beside each code cell that has code: "[3]:", "[*]:" while it runs or waits, "[ ]:" before."""
        cells = self.page.locator(".jp-Notebook .jp-CodeCell")
        return [text.strip() for text in cells.locator(".jp-InputArea .jp-InputPrompt").all_inner_texts()]

    def missing(self, lines: list[str]) -> list[str]:
        """Those of the lines that no output shows, when the page has had its time to draw what the kernel sent."""
        with suppress(AssertionError):
            until(lambda: all(line in self.outputs() for line in lines), 120, every=0.2)
        return [line for line in lines if line not in self.outputs()]

    def outputs(self) -> str:
        """The text of all outputs."""
        return "\n".join(self.page.locator(".jp-Notebook .jp-OutputArea").all_inner_texts())

    def errors(self) -> list[str]:
        """The text of each output that is an error, with or without traceback; drawn like what went to stderr."""
        drawn = self.page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]')
        return [text for text in drawn.all_inner_texts() if re.search(r"^\w*(Error|Interrupt|Exception)\b", text, re.M)]

    def explorer(self, attribute: str = "alt") -> str:
        """What the explorer's picture says to those who cannot see it, or another attribute of the picture."""
        return self.page.locator(".jp-Notebook .widget-html img").first.get_attribute(attribute)

    def move_slider(self, name: str, steps: int) -> str:
        """Move a slider of the explorer with the keyboard; returns the number that then stands beside it."""
        slider = self.page.locator(".widget-hslider", has=self.page.locator(".widget-label", has_text=name)).first
        handle = slider.locator(".noUi-handle")
        handle.scroll_into_view_if_needed()
        handle.focus()
        for _ in range(abs(steps)):
            handle.press("ArrowRight" if steps > 0 else "ArrowLeft")
        return slider.locator(".widget-readout").inner_text()


@contextmanager
def jupyterlab(folder: Path, solutions: bool = True) -> Iterator[Lab]:
    """JupyterLab on copies of the lessons without outputs, or on a learner's (no `solutions`), and Chromium."""
    lessons = folder / "lessons"
    shutil.copytree(ROOT / "notebooks", lessons, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "images"))
    shutil.copytree(ROOT / "data", folder / "data")  # where the programs to take home look for it
    for lesson in lessons.glob("*.ipynb"):
        notebook = json.loads(lesson.read_text(encoding="utf-8"))
        store(lesson, written(learners_copy(notebook, solutions)))
    port, token = free_port(), secrets.token_hex(16)
    server = subprocess.Popen(_command(lessons, port, token), env=_environment(folder), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _answers(server, f"{url}/api?token={token}"), every=0.3)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=list(_QUIET))
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.set_default_timeout(120_000)  # milliseconds; for a machine that has other things to do
            yield Lab(page, url, token, lessons)
            browser.close()
    finally:
        server.terminate()
        server.wait(180)  # it ends its kernels first


def _command(lessons: Path, port: int, token: str) -> list[str]:
    return [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        f"--ServerApp.root_dir={lessons}", f"--IdentityProvider.token={token}", "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip


def _environment(folder: Path) -> dict[str, str]:
    """Settings and workspaces in `folder`, not the user's; the lessons on virtual GPUs."""
    settings = folder / "settings"
    for name, content in _SETTINGS.items():
        path = settings / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    own = {"JUPYTER_CONFIG_DIR": folder / "config", "JUPYTERLAB_SETTINGS_DIR": settings,
           "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces", "GPUS": "virtual"}  # fmt: skip
    return os.environ | {name: str(value) for name, value in own.items()}


def _answers(server: subprocess.Popen, url: str) -> bool:
    assert server.poll() is None, f"JupyterLab ended at once, with {server.returncode}"
    with suppress(OSError):
        return bool(urllib.request.urlopen(url, timeout=5).read())
    return False
