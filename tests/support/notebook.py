"""A real Jupyter kernel that runs the cells of a notebook, as a workbench of OpenShift AI does.

A notebook is a Python file whose cells begin with `# %%`, as Jupytext and editors have them. The source of a cell is
only in the kernel's history, so a training function reaches a job as it does from Jupyter.
"""

from collections.abc import Iterator
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
    """

    def __init__(self, client: Any) -> None:
        self._client = client

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
        yield Kernel(client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


__all__ = ["Kernel", "cells", "kernel"]
