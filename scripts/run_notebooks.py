"""Runner for docs/notebooks: executes each notebook from top to bottom and saves its outputs.

    nox -s notebooks
    python scripts/run_notebooks.py [part of a name]

The saved outputs do not depend on the machine: they hold no paths, times or kernel metadata.
"""

import argparse
import base64
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbclient
import nbformat
from jupyter_client.manager import AsyncKernelManager
from PIL import Image  # matplotlib brings it

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
SECONDS = 900  # for one cell; a free core needs a tenth of it
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(file: Path) -> Any:
    """Runs a notebook in a new kernel of this environment and returns it with fresh outputs.

    Raises:
        CellExecutionError: If a cell raises; the message shows it.
    """
    notebook = nbformat.read(file, as_version=4)
    beside = {"metadata": {"path": str(FOLDER)}}  # a notebook reads the files next to it
    with TemporaryDirectory() as sockets:  # in the file system: no port is opened
        connection = f"{sockets}/kernel.json"
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=connection)
        return nbclient.NotebookClient(notebook, timeout=SECONDS, km=kernel, resources=beside).execute()


def cleaned(notebook: Any) -> Any:
    """Removes everything that depends on the place and time of the run."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Joins neighboring pieces of one stream. Their boundaries depend on the load of the machine."""
    found: list[Any] = []
    for output in outputs:
        if found and output.get("name") is not None and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def smaller(png: str) -> str:
    """Returns a picture, base64 in and out, with a palette. Lines and bars need at most 128 colors."""
    picture, file = Image.open(BytesIO(base64.b64decode(png))), BytesIO()
    picture.convert("RGB").quantize(128).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> int:
    """Runs each notebook and writes it back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="", help="Run only notebooks with this in their name.")
    part = parser.parse_args().part
    for file in sorted(file for file in FOLDER.glob("*.ipynb") if part in file.name):
        print(f"running {file.name}", file=sys.stderr, flush=True)
        nbformat.write(cleaned(executed(file)), file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
