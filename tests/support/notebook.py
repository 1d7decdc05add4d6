"""A real Jupyter kernel that runs the cells of a notebook, as a workbench of OpenShift AI does.

A notebook of the tests is a Python file whose cells begin with `# %%`, as Jupytext and editors have them. The source
of a cell is only in the kernel's history, so a training function reaches a job as it does from Jupyter.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE

_CELL_S = 400
_START_S = 60


class Kernel:
    """A running kernel.

    Args:
        client: Jupyter's client of it.
        manager: Jupyter's manager of its process.
    """

    def __init__(self, client: Any, manager: Any) -> None:
        self._client = client
        self._manager = manager

    def run(self, cell: str) -> str:
        """Run a cell, and return what it prints.

        Raises:
            AssertionError: it raised something; with its output and traceback.
        """
        printed: list[str] = []

        def keep(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                printed.append("\n".join(content["traceback"]))

        answer = self._client.execute_interactive(
            cell, timeout=_CELL_S * PATIENCE, allow_stdin=False, output_hook=keep
        )
        assert answer["content"]["status"] == "ok", f"{cell}\n{''.join(printed)}"
        return "".join(printed)

    def interrupted(self, cell: str) -> tuple[list[Any], Any]:
        """Run a cell, and interrupt it when it has displayed something.

        Returns:
            The messages that it has sent, and its answer.
        """
        messages: list[Any] = []
        was_interrupted = False

        def keep(message: Any) -> None:
            nonlocal was_interrupted
            messages.append(message)
            if message["msg_type"] == "display_data" and not was_interrupted:
                was_interrupted = True
                self._manager.interrupt_kernel()

        answer = self._client.execute_interactive(
            cell, timeout=_CELL_S * PATIENCE, allow_stdin=False, output_hook=keep
        )
        return messages, answer["content"]

    def run_all(self, notebook: Path) -> str:
        """Run all cells of a notebook, and return what they print."""
        return "".join(map(self.run, cells(notebook)))


def cells(notebook: Path) -> list[str]:
    """The cells of a notebook, without what stands before the first one."""
    return [cell.partition("\n")[2] for cell in notebook.read_text().split("# %%")[1:]]


@contextmanager
def kernel(folder: Path, environment: dict[str, str]) -> Iterator[Kernel]:
    """A kernel in a folder, with these variables; it ends with the block."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(startup_timeout=_START_S * PATIENCE, cwd=str(folder), env=environment)
    try:
        yield Kernel(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def executed(
    notebook: Path, folder: Path, environment: dict[str, str], *, replaced: Mapping[str, str] | None = None
) -> Any:
    """A notebook (`.ipynb`) with its outputs, executed in a kernel in a folder, with these variables.

    Args:
        notebook: the file; it is not changed.
        folder: the current folder of the kernel.
        environment: the variables of the kernel.
        replaced: other sources for cells, by the `id` of the cell.
    """
    import nbformat
    from nbclient import NotebookClient

    document: Any = nbformat.read(notebook, as_version=4)  # pyright: ignore[reportUnknownMemberType]
    for cell in document.cells:
        cell.source = (replaced or {}).get(cell.id, cell.source)
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        document, timeout=_CELL_S * PATIENCE, startup_timeout=_START_S * PATIENCE, resources=place
    )
    return client.execute(env=environment)


def written(path: Path, sources: Sequence[str]) -> Path:
    """Write a notebook (`.ipynb`) with these cells, and return its path."""
    import nbformat

    made: Any = nbformat.v4
    document = made.new_notebook(cells=[made.new_code_cell(source) for source in sources])
    nbformat.write(document, path)  # pyright: ignore[reportUnknownMemberType]
    return path


def outputs(document: Any, cell_id: str) -> list[Any]:
    """The outputs of a cell of an executed notebook."""
    [cell] = [cell for cell in document.cells if cell.id == cell_id]
    return list(cell.outputs)


__all__ = ["Kernel", "cells", "executed", "kernel", "outputs", "written"]
