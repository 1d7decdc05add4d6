"""One process of `bench_export.py`: writes a sharded checkpoint, or exports one in one way."""

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def make_dcp(folder: Path, num_tensors: int, rows: int) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"layers.{number}.weight": distribute_tensor(torch.randn(rows, 1024), mesh, [Shard(0)])
        for number in range(num_tensors)
    }
    dcp.save({"model": state}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dist.destroy_process_group()


def make_zero(folder: Path, num_tensors: int, rows: int) -> None:
    import deepspeed
    import torch.distributed as dist

    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(1024, rows, bias=False) for _ in range(num_tensors)]
    model = torch.nn.ModuleList(layers)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.save_checkpoint(str(folder))
    dist.destroy_process_group()


def by_safepoint(source: Path, target: Path) -> None:
    from safepoint.checkpoint.tools.export import export_pieces
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store

    export_pieces(open_store(parse_location(str(source))), "", parse_location(str(target)))


def into_store(source: Path, target: Path) -> None:
    from safepoint.checkpoint.tools.export import export_pieces
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store

    export_pieces(open_store(parse_location(str(source))), "", parse_location(os.environ["HF_BENCH_STORE"]))


def from_store_into_store(source: Path, target: Path) -> None:
    from safepoint.checkpoint.tools.export import export_pieces
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store

    store = open_store(parse_location(os.environ["HF_BENCH_SOURCE"]))
    export_pieces(store, "", parse_location(os.environ["HF_BENCH_STORE"]))


def over_folder_into_store(source: Path, target: Path) -> None:
    """The work without streaming: export to the disk, then upload."""
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store

    by_safepoint(source, target)
    store = open_store(parse_location(os.environ["HF_BENCH_STORE"]))
    for path in target.iterdir():
        store.upload(path.name, path)
    shutil.rmtree(target)


def stream_into_store(source: Path, target: Path) -> None:
    """Upload as many bytes from memory."""
    from safepoint.storage.location import parse_location
    from safepoint.storage.opening import open_store
    from safepoint.storage.store import Content, Sink

    block, count = memoryview(bytearray(os.urandom(1 << 20))), int(os.environ["HF_BENCH_MB"])

    def write_to(sink: Sink) -> None:
        for _ in range(count):
            sink(block)

    content = Content(size_bytes=count << 20, write_to=write_to)
    open_store(parse_location(os.environ["HF_BENCH_STORE"])).upload("model.safetensors", content)


def by_accelerate(source: Path, target: Path) -> None:
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(source / "pytorch_model_fsdp_0"), str(target))


def by_dcp(source: Path, target: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target.mkdir()
    dcp_to_torch_save(source / "pytorch_model_fsdp_0", target / "model.pt")


def by_zero_to_fp32(source: Path, target: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(source), str(target), safe_serialization=True)


def by_copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.rglob("*"):
        if path.suffix in {".distcp", ".pt"} and "model_states" not in path.name:
            shutil.copyfile(path, target / path.name)


SYSTEMS: dict[str, Callable[[Path, Path], None]] = {
    "safepoint": by_safepoint,
    "accelerate": by_accelerate,
    "dcp to torch.save": by_dcp,
    "zero_to_fp32": by_zero_to_fp32,
    "copy": by_copy,
    "into a store": into_store,
    "store to store": from_store_into_store,
    "over a folder": over_folder_into_store,
    "stream": stream_into_store,
}
_OURS = ("safepoint.checkpoint.tools.export", "safepoint.storage.object_store", "safepoint.storage.location")
IMPORTS = {
    "safepoint": ("safepoint.checkpoint.tools.export", "safepoint.storage.location"),
    "accelerate": ("accelerate.utils",),
    "dcp to torch.save": ("torch.distributed.checkpoint.format_utils",),
    "zero_to_fp32": ("deepspeed.utils.zero_to_fp32",),
    "copy": (),
    **dict.fromkeys(("into a store", "store to store", "over a folder", "stream"), _OURS),
}


def memory_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def export(system: str, source: Path, target: Path) -> None:
    for name in IMPORTS[system]:
        __import__(name)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_mb = memory_mb("VmRSS:")
    began_s = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        SYSTEMS[system](source, target)
        os.sync()
    seconds = time.perf_counter() - began_s
    print(json.dumps({"peak_mb": memory_mb("VmHWM:") - before_mb, "seconds": seconds}))


def main() -> None:
    match sys.argv[1:]:
        case ["make", kind, folder, mb, tensor_mb]:
            make = {"dcp": make_dcp, "zero": make_zero}[kind]
            make(Path(folder), int(mb) // int(tensor_mb), int(tensor_mb) * 256)
        case ["export", system, source, target]:
            export(system, Path(source), Path(target))
        case _:
            raise SystemExit("make KIND FOLDER MB TENSOR_MB, or export SYSTEM SOURCE TARGET")


if __name__ == "__main__":
    main()
