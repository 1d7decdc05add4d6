"""The systems that `bench_snapshot.py` compares, each behind the same interface.

Each peer is used as its documentation says for training on a CPU, with the settings that make it fastest there.
Where a peer does not make its files durable, `durability` says so, and its clock stops when it calls itself done.
"""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from process_family import MARK

DCP_FILES_ONLY = "files, not the folder"
NO_FSYNC = "none"


class System:
    """One way of saving: training waits for `save`, and `guard` surrounds each `optimizer.step`."""

    durability: ClassVar[str] = "yes"
    remark: ClassVar[str] = ""

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.start()

    def start(self) -> None:
        """Do what a program does once, before its first step: start processes, allocate memory."""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def guard(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_durable(self) -> None:
        """Wait until the last save is on disk, or until the system reports that it is done."""

    def close(self) -> None:
        """End what `start` began."""


class NoSave(System):
    """Saves nothing; its apparent cost is the noise of the measurement."""

    remark = "noise of this measurement"

    def save(self, step: int) -> None:
        pass


class Safepoint(System):
    def start(self) -> None:
        from safepoint.snapshot import Checkpointer

        self._checkpointer = Checkpointer(self.folder)
        self._checkpointer.__enter__()
        self._checkpointer.prepare({"model": self.model, "optimizer": self.optimizer})

    def path(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save(self, step: int) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "extra": {"step": step}}
        self._saving = self._checkpointer.save(state, step=step)

    def wait_durable(self) -> None:
        self._saving.wait()

    def close(self) -> None:
        self._checkpointer.__exit__(None, None, None)


class TorchSave(System):
    def save(self, step: int) -> None:
        target = self.path(step)
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        fsync_folder(self.folder)


class DcpSave(System):
    durability = DCP_FILES_ONLY

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=self.path(step))


class DcpAsync(System):
    """`async_save` with default settings: a new stager for each save."""

    durability = DCP_FILES_ONLY

    def __init__(self, *arguments: Any) -> None:
        self.options: dict[str, Any] = {}
        self.response: Any = None
        super().__init__(*arguments)

    def keep_stager(self, *, shared: bool = False, beside: bool = False) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.options["async_stager"] = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=shared,
                use_async_staging=beside,
                use_non_blocking_copy=False,
            )
        )

    def planner(self) -> Any:
        """A planner that reuses the plan of the previous save; DCP keeps plans per class, not per planner."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        return DefaultSavePlanner(enable_plan_caching="async_stager" in self.options)

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.response = dcp.async_save(
            self.state(), checkpoint_id=self.path(step), planner=self.planner(), **self.options
        )

    def wait_durable(self) -> None:
        getattr(self.response, "upload_completion", self.response).result()

    def close(self) -> None:
        if "async_stager" in self.options:
            self.options["async_stager"].close()


class DcpCached(DcpAsync):
    """A stager that lives as long as the training and reuses its memory; plans are reused too."""

    def start(self) -> None:
        self.keep_stager()


class DcpBeside(DcpAsync):
    """Like `DcpCached`, but the copy runs beside forward and backward; `optimizer.step` waits for it."""

    def start(self) -> None:
        self.keep_stager(beside=True)

    @contextmanager
    def guard(self) -> Iterator[None]:
        if self.response is not None:
            staged: Future[None] = self.response.staging_completion
            staged.result()
        yield


class DcpProcess(DcpAsync):
    """Like `DcpCached`, in shared memory; a process, which starts with the first save, writes it."""

    def start(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        os.environ["MASTER_ADDR"] = "127.0.0.1"
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.keep_stager(shared=True)
        self.options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

    def close(self) -> None:
        super().close()
        torch.distributed.destroy_process_group()


class DlRover(System):
    """Flash Checkpoint without DLRover's launcher: the training process starts the saver itself."""

    durability = NO_FSYNC

    def start(self) -> None:
        # Its sockets and shared memory carry this name, so that no other run is met, and all can be found again.
        os.environ["TORCHELASTIC_RUN_ID"] = os.environ[MARK]
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._checkpointer = DdpCheckpointer(str(self.folder))
        self._step = -1

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def save(self, step: int) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._checkpointer.save_checkpoint(step, self.state(), storage_type=StorageType.DISK)
        if self._checkpointer._engine.latest_step != step:
            raise RuntimeError(f"DLRover skipped the save of step {step}")
        self._step = step

    def wait_durable(self) -> None:
        """Its own wait looks every three seconds; this one looks at the same file every millisecond."""
        from dlrover.python.common.constants import CheckpointConstant

        tracker = self.folder / CheckpointConstant.TRACER_FILE_NAME
        while not tracker.exists() or tracker.read_text() != str(self._step):
            time.sleep(0.001)

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine.close()
        if engine.saver_proc is not None:
            engine.saver_proc.terminate()
            engine.saver_proc.join()
        sweep(os.environ[MARK])


class TorchCheckpointing(System):
    """Without pinned memory, non-blocking copies and O_DIRECT, which need CUDA, CUDA, and another file system."""

    durability = NO_FSYNC

    def start(self) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._manager.prewarm_staging(self.state())

    def save(self, step: int) -> None:
        self._writing = self._manager.save(str(self.path(step)), self.state())

    def guard(self) -> AbstractContextManager[object]:
        return self._manager.lock()

    def wait_durable(self) -> None:
        assert self._writing is not None
        self._writing.result()

    def close(self) -> None:
        self._manager.close()


class HfTrainer(System):
    """The Trainer's own save: model, optimizer, scheduler, random numbers and its state, on the training thread."""

    durability = NO_FSYNC

    def start(self) -> None:
        from transformers import Trainer, TrainingArguments

        scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        arguments = TrainingArguments(output_dir=str(self.folder), use_cpu=True, report_to=[], disable_tqdm=True)
        self._trainer = Trainer(self.model, arguments, optimizers=(self.optimizer, scheduler))

    def path(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save(self, step: int) -> None:
        self._trainer.state.global_step = step
        self._trainer._save_checkpoint(self.model, trial=None)


SAFEPOINT = "safepoint"
SYSTEMS: dict[str, type[System]] = {
    "no save": NoSave,
    SAFEPOINT: Safepoint,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp async": DcpAsync,
    "dcp async, cached": DcpCached,
    "dcp async, cached, beside": DcpBeside,
    "dcp async, process": DcpProcess,
    "dlrover": DlRover,
    "torch_checkpointing": TorchCheckpointing,
    "hf trainer": HfTrainer,
}


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(mark: str) -> None:
    """Delete what DLRover leaves behind: sockets and named shared memory."""
    shutil.rmtree(Path("/tmp/ckpt_sock") / mark, ignore_errors=True)
    for segment in Path("/dev/shm").glob(f"{mark}_*"):
        segment.unlink(missing_ok=True)
