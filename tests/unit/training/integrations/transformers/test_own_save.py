"""Where a script's own `_save_checkpoint` writes, and what the library's sees meanwhile."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safepoint.training.integrations.transformers.own_save import redirected_output_dir


class Library:
    __module__ = "transformers.trainer"
    args: Any
    seen = ""

    def _save_checkpoint(self) -> None:
        self.seen = self.args.output_dir


class Own(Library):
    __module__ = "__main__"

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()
        Path(self.args.output_dir, "checkpoint-3", "more").write_text("more")
        Path(self.args.output_dir, "newest").write_text("3")


def save(trainer: Library, tmp_path: Path) -> Path:
    output, root = tmp_path / "output", tmp_path / "root"
    output.mkdir()
    (root / "checkpoint-3").mkdir(parents=True)
    trainer.args = SimpleNamespace(output_dir=str(output))
    original = Library._save_checkpoint
    with redirected_output_dir(trainer, root):
        trainer._save_checkpoint()
    assert Library._save_checkpoint is original
    assert trainer.args.output_dir == str(output)
    assert trainer.seen == str(output)
    return output


def test_what_is_added_to_the_checkpoint_is_in_it(tmp_path: Path) -> None:
    """And what belongs to the output folder is there."""
    output = save(Own(), tmp_path)
    assert (tmp_path / "root" / "checkpoint-3" / "more").read_text() == "more"
    assert [path.name for path in output.iterdir()] == ["newest"]
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["checkpoint-3"]


def test_a_library_alone_is_led_by_nothing(tmp_path: Path) -> None:
    """Neither transformers nor TRL needs it."""
    assert not list(save(Library(), tmp_path).iterdir())
