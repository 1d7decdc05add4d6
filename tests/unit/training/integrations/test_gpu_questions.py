"""Questions for GPUs in a process from which ranks are copied: a copy asks, because NVML would stay open."""

import os
from pathlib import Path

import pytest
import torch

from safepoint.training.integrations import gpu_questions


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs. The file has the process of each question."""
    file = tmp_path / "asked"

    def count() -> int:
        with file.open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return 2

    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", count)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: ["GPU-1", "GPU-2"])
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu_questions.install_before_ranks()
    return file


def test_another_process_asks_once(asked: Path) -> None:
    """torch gets the answer as from NVML, and CUDA_VISIBLE_DEVICES counts each time."""
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
        assert torch.cuda.device_count() == 1
    (pid,) = asked.read_text().splitlines()
    assert int(pid) != os.getpid()


def test_a_copy_asks_by_itself(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of GPUs may have changed since the template was made."""
    assert torch.cuda.device_count() == 2
    copy = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: copy)
    assert torch.cuda.device_count() == 2
    assert asked.read_text().splitlines()[1:] == [str(copy)]


@pytest.mark.parametrize("error", [OSError("no library"), AttributeError("no function"), KeyError("a bug")])
def test_a_question_that_fails_has_no_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch expects an OSError, and asks the driver then."""

    def fail() -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", fail)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", fail)
    gpu_questions.install_before_ranks()
    with pytest.raises(OSError, match="did not answer"):
        torch.cuda._raw_device_count_nvml()
    assert torch.cuda._device_count_nvml() == -1


def test_a_release_of_torch_without_these_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is replaced."""
    monkeypatch.delattr(torch.cuda, "_raw_device_count_nvml")
    monkeypatch.delattr(torch.cuda, "_raw_device_uuid_nvml")
    gpu_questions.install_before_ranks()
    assert not hasattr(torch.cuda, "_raw_device_count_nvml")
