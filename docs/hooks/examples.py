"""The pages of the worked examples, made from the notebooks: text, code, and the rendered figure."""

import pathlib

import jupytext
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]


def on_files(files, config):
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        notebook = jupytext.read(path)
        if not any("parameters" in cell.metadata.get("tags", ()) for cell in notebook.cells):
            continue  # not a notebook
        page = f"examples/{path.stem}.md"
        files.append(File.generated(config, page, content=_page(notebook, path.stem)))
    return files


def _page(notebook, name):
    title, *cells = notebook.cells
    parts = [title.source, f"![The result](../figures/{name}.png)"]
    for cell in cells:
        parts.append(
            cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        )
    parts.append(
        f"This page is `notebooks/{name}.py`, which the tests execute "
        f"(`python notebooks/execute.py {name}` draws the figure)."
    )
    return "\n\n".join(parts)
