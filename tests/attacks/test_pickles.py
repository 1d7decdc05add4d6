"""Pickles that would hash, compare, print or allocate for ever: `export` refuses them within seconds, or reads them.

Each attack runs in a process of its own, because what hangs in C cannot be stopped from within.
"""

import io
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from safepoint.checkpoint.weights.dcp_weights import dcp_weights
from safepoint.checkpoint.weights.torch_file import read_inert, read_torch_file
from safepoint.errors import CheckpointError

_LIMIT_S = 40
_ADDRESS_SPACE = 6 << 30


def number(value: int) -> bytes:
    return (
        pickle.LONG4
        + (value.bit_length() // 8 + 1).to_bytes(4, "little")
        + value.to_bytes(value.bit_length() // 8 + 1, "little")
    )


def doubled(begin: bytes, pair: bytes, depth: int = 80) -> bytes:
    """A value whose two parts are the same value, and so on: of `depth` objects, and 2**depth parts."""
    return begin + b"".join(b"q" + bytes([level]) + b"h" + bytes([level]) + pair for level in range(depth))


TUPLES = doubled(b"K\x01", pickle.TUPLE2)
LISTS = (
    b"".join(b"]q" + bytes([level]) for level in range(80))
    + b"".join(
        b"h" + bytes([level]) + b"h" + bytes([level + 1]) + b"ah" + bytes([level + 1]) + b"a0" for level in range(79)
    )
    + b"0" * 79
)
DEEP = b"K\x01" + pickle.TUPLE1 * 2_000_000
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def tensor(offset: bytes, sizes: bytes, strides: bytes) -> bytes:
    return b"}X\x01\x00\x00\x00w" + REBUILD + b"(" + STORAGE + offset + sizes + strides + b"\x89}tRs."


HOSTILE = {
    "a key of tuples in a dictionary": b"}" + TUPLES + b"Ns.",
    "keys of tuples in a dictionary": b"}(" + TUPLES + b"Nu.",
    "keys of tuples before the dictionary": b"(" + TUPLES + b"Nd.",
    "a tuple in a set": b"\x80\x04\x8f(" + TUPLES + b"\x90.",
    "a tuple in a frozen set": b"\x80\x04(" + TUPLES + b"\x91.",
    "a deep tuple as a key": b"}" + DEEP + b"Ns.",
    "a deep frozen set as a key": b"\x80\x04}(" + b"(" * 100_000 + b"K\x01" + b"\x91" * 100_000 + b"Nu.",
    "a key in an ordered dictionary": b"ccollections\nOrderedDict\n]](" + TUPLES + b"Neea\x85R.",
    "a key in the state of an ordered dictionary": b"ccollections\nOrderedDict\n)R}" + TUPLES + b"Nsb.",
    "a key in a dictionary in a tuple key": b"}(K\x01K\x02" + TUPLES + b"tNs.",
    "a key with many parts": b"}(" + b"K\x01" * 5000 + b"tNs.",
    "a huge number as a key": b"}" + number(1 << 8_000_000) + b"Ns.",
    "a tuple as a storage's name": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + TUPLES + b"NK\x04tQ.",
    "a list as a storage's name": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + LISTS + b"NK\x04tQ.",
    "a tuple as a storage's type": b"(X\x07\x00\x00\x00storage" + TUPLES + b"X\x01\x00\x00\x000NK\x04tQ.",
    "a storage that is none": REBUILD + b"(X\x01\x00\x00\x00a" + TUPLES + b"\x86K\x00K\x02\x85K\x01\x85\x89}tR.",
    "a tensor of huge numbers": tensor(b"K\x00", b"(" + number(1 << 80_000) * 50 + b"t", b"(" + b"K\x01" * 50 + b"t"),
    "a tensor of many dimensions": tensor(b"K\x00", b"(" + b"M\xff\xff" * 1_000_000 + b"t", b"K\x01\x85"),
    "a tensor at an offset that is a list": tensor(LISTS, b"K\x02\x85", b"K\x01\x85"),
    "a tensor at a negative offset": tensor(b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85"),
    "a memo of two thousand million": b"Nr\xff\xff\xff\x7f.",
    "an array of bytes that is not there": b"\x80\x05\x96" + (1 << 42).to_bytes(8, "little") + b".",
    "a string that is not there": b"\x80\x04\x8d" + (1 << 42).to_bytes(8, "little") + b".",
    "a frame that is not there": b"\x80\x04\x95" + (1 << 42).to_bytes(8, "little") + b"N.",
    "a buffer from elsewhere": b"\x80\x05\x97.",
    "many classes": b"".join(b"ca\nB%d\n0" % level for level in range(20_000)) + b"N.",
    "the state of a function": REBUILD + b"N}X\x0c\x00\x00\x00__defaults__)s\x86b.",
    "the state of a class": b"ca\nB\n}X\x01\x00\x00\x00aK\x01sb.",
    "a class that is called": b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
    "an end without a beginning": b"t.",
    "nothing": b"",
}  # fmt: skip


def archive(pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/data/0", b"\0" * 16)
    return buffer.getvalue()


PIECE = archive(REBUILD + b"(" + STORAGE + b"K\x00K\x02\x85K\x01\x85\x89}tR.")
PROGRAM = """
    import resource, sys
    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    from pathlib import Path
    from safepoint.checkpoint.tools.export import _weights
    from safepoint.errors import CheckpointError
    for place in Path(sys.argv[1]).iterdir():
        print(place.name, end=": ", flush=True)
        try:
            _weights(place, place / "model.pt" if (place / "model.pt").exists() else place)
            print("read", flush=True)
        except (CheckpointError, OSError) as error:
            print(str(error)[:100].replace(chr(10), " "), flush=True)
"""


def export_all(folder: Path) -> dict[str, str]:
    """What is said of each checkpoint in the folder."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).replace("SPACE", str(_ADDRESS_SPACE)), str(folder)],
        capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-200:]} {done.stderr[-2000:]}"
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.timeout(_LIMIT_S + 10)
def test_hostile_files_of_torch_are_refused_at_once(tmp_path: Path) -> None:
    """Nothing hangs, crashes or takes more memory than there is."""
    for name, pickled in HOSTILE.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_bytes(archive(pickled))
    found = export_all(tmp_path)
    assert found.keys() == HOSTILE.keys()
    assert "read" not in found.values(), found


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def inert(kind: str, **state: bytes) -> bytes:
    items = b"".join(text(key) + value for key, value in state.items())
    return b"ca\n" + kind.encode() + b"\n)\x81}(" + items + b"ub"


def metadata(*, fqn: bytes = text("w"), path: bytes = text("f"), offset: bytes = b"K\x00\x85", names: bytes = b"}",
             dtype: bytes = b"ctorch\nfloat32\n", size: bytes = b"K\x02\x85") -> bytes:  # fmt: skip
    chunk = inert("Chunk", offsets=offset, sizes=size)
    entry = inert(
        "TensorStorageMetadata", properties=b"ca\nP\n)\x81" + dtype + b"\x85b", size=size, chunks=b"](" + chunk + b"e"
    )
    index, info = (
        inert("Index", fqn=fqn, offset=offset),
        inert("Info", relative_path=path, offset=b"K\x00", length=b"J" + len(PIECE).to_bytes(4, "little")),
    )
    described, places = b"}" + text("w") + entry + b"s", b"}" + index + info + b"s"
    whole = inert("Metadata", state_dict_metadata=described, storage_data=places, planner_data=names)
    return b"\x80\x02" + whole + b"."


@pytest.mark.timeout(_LIMIT_S + 10)
def test_names_and_places_of_dcp_are_checked_before_they_are_used(tmp_path: Path) -> None:
    """No key, path, type, shape or offset is hashed, compared or printed before it is known to be plain."""
    values = {"tuples": TUPLES, "lists": LISTS, "lists in a tuple": b"(" + LISTS + b"t"}
    for what in ("fqn", "path", "offset", "dtype", "size", "names"):
        for name, value in values.items():
            place = tmp_path / f"{name} as {what}"
            place.mkdir()
            hostile = b"}" + text("w") + value + b"s" if what == "names" else value
            (place / "f").write_bytes(PIECE)
            (place / ".metadata").write_bytes(metadata(**{what: hostile}))
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "f").write_bytes(PIECE)
    (tmp_path / "good" / ".metadata").write_bytes(metadata())
    found = export_all(tmp_path)
    assert found.pop("good") == "read"
    assert len(found) == 6 * len(values)
    assert "read" not in found.values(), found


def test_many_instructions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safepoint.checkpoint.pickles.bounded_pickle._MAX_INSTRUCTIONS", 1000)
    assert read_inert(b"N0" * 400 + b"N.") is None
    with pytest.raises(CheckpointError, match="instructions"):
        read_inert(b"N0" * 600 + b"N.")


def test_many_tuples_as_keys_are_counted() -> None:
    assert len(read_inert(pickle.dumps({(one, "a"): one for one in range(9000)}))) == 9000
    with pytest.raises(CheckpointError, match="too many"):
        read_inert(pickle.dumps({(one, "a"): one for one in range(11_000)}))


def test_a_pickle_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(CheckpointError, match="more than"):
        dcp_weights(tmp_path)


def test_what_torch_writes_is_still_read(tmp_path: Path) -> None:
    state = OrderedDict({"w": torch.ones(2, 2), "b": torch.nn.Parameter(torch.ones(2))})
    state._metadata = {"": {"version": 1}}  # pyright: ignore
    whole = {
        "state_dict": state, 3: {1.5, "a"}, (1, ("b", None)): frozenset({2}), "size": torch.Size([1]),
        "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(), True: b"x", "list": [[]] * 3,
    }  # fmt: skip
    torch.save(whole, tmp_path / "a.pt")
    assert list(read_torch_file(tmp_path / "a.pt")["state_dict"]) == ["w", "b"]
    for protocol in range(2, 6):
        found = read_inert(
            pickle.dumps({key: value for key, value in whole.items() if key != "state_dict"}, protocol=protocol), {}
        )
        assert {"size", "optimizer", "list", 3, True, (1, ("b", None))} == found.keys()
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump(OrderedDict(a=[1]))
    assert read_inert(buffer.getvalue()) == {"a": [1]}
