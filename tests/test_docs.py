"""The documentation: it builds without a warning, and its examples do what they say."""

import doctest
import pathlib
import re

import jax
import pytest

from pybridge.julia import find
from pybridge.julia.errors import JuliaNotFoundError

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
# A fenced block of a Python session: ```pycon, or ```{.pycon .julia} where it takes a Julia.
SESSION = re.compile(r"^```(?:pycon|\{\.pycon( \.julia)?\})\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def julia_is_there():
    try:
        return bool(find.find())
    except JuliaNotFoundError:
        return False


@pytest.fixture
def default_precision():
    """Pages that want 64 bits switch them on, as their readers do."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("page", PAGES)
def test_examples(page, default_precision):
    text = (DOCS / page).read_text()
    blocks = [
        # Blank lines in place of what comes before, so that a failure names the page's own line.
        "\n" * text.count("\n", 0, found.start(2)) + found[2]
        for found in SESSION.finditer(text)
        if not found[1] or julia_is_there()
    ]
    report = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    names = {}
    for block in blocks:
        examples = doctest.DocTestParser().get_doctest(block, names, page, page, 0)
        runner.run(examples, out=report.append, clear_globs=False)
        names = examples.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_the_site_builds_without_a_warning(tmp_path):
    for needed in ("mkdocs", "material", "mkdocstrings", "jupytext"):
        pytest.importorskip(needed, reason=f"pip install 'pybridge-julia[docs]' ({needed})")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # a warning aborts
    built = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("index.html")}
    for page in [*PAGES, *(f"examples/{name}.md" for name in ("forces", "burgers", "solver"))]:
        folder = page.removesuffix(".md").removesuffix("index")
        assert str(pathlib.Path(folder) / "index.html") in built
