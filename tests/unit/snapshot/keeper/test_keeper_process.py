"""The keeper's process, as a program."""

import subprocess
import sys


def test_it_imports_no_torch() -> None:
    """It is there when ranks are, and costs no second and no memory of its own."""
    code = (
        "import sys, safepoint.snapshot.keeper.__main__;print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "set()\n", done.stderr
