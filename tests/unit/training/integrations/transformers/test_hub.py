"""What of an output folder is uploaded."""

from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub.utils import filter_repo_objects

from safepoint.training.context.outputs import Outputs
from safepoint.training.integrations.transformers.hub import hook_uploads


def hooked(output: Path) -> tuple[Any, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    class Api:
        def upload_folder(self, **kwargs: Any) -> str:
            calls.append(kwargs)
            return "done"

    module: Any = ModuleType("huggingface_hub.hf_api")
    module.HfApi, module.api = Api, Api()
    module.upload_folder = module.api.upload_folder
    outputs = Outputs()
    outputs.claim(output, hint="")
    hook_uploads(module, outputs)
    return module, calls


def test_nothing_of_safepoints_is_uploaded(tmp_path: Path) -> None:
    """Beside what the caller leaves out, given in either form; by the method and by the function."""
    module, calls = hooked(tmp_path)
    assert module.api.upload_folder(folder_path=str(tmp_path), ignore_patterns=["_*"]) == "done"
    module.upload_folder(folder_path=tmp_path, ignore_patterns="_*")
    module.api.upload_folder(folder_path=tmp_path)
    paths = [
        "config.json",
        "_x",
        ".safepoint/lock",
        ".safepoint/work/a/b",
        "set-aside-1/checkpoint-2/x",
        "set-aside.md",
    ]
    left = [list(filter_repo_objects(paths, ignore_patterns=call["ignore_patterns"])) for call in calls]
    assert left == [["config.json", "set-aside.md"]] * 2 + [["config.json", "_x", "set-aside.md"]]


def test_other_folders_are_none_of_its_business(tmp_path: Path) -> None:
    """They are uploaded as they are."""
    module, calls = hooked(tmp_path / "output")
    module.api.upload_folder(folder_path=tmp_path)
    assert calls == [{"folder_path": tmp_path}]
