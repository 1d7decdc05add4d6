"""The classes and functions that the pickles of a checkpoint may name.

These are the names that `weights_only=True` of torch allows, and further names that frameworks need.
(`training/state/data_only.py` checks the names again before a file is loaded.) Each allowed class or function only
makes data: a call of it runs no other code. Tensor types such as `torch.FloatTensor` are not allowed: `torch.save`
does not write them, and `torch.FloatTensor(1000)` returns memory that is not initialised.
"""

import re
from collections.abc import Collection

from safepoint.errors import CheckpointError, printable

_TORCH = re.compile(
    r"torch(\.cuda|\.sparse|\.cuda\.sparse)?\.\w+Storage|torch\.(Size|Tensor|device)"
    r"|torch\.(bfloat16|bool|(complex|float|int|uint|bits|q?u?int)\w+|per_(tensor|channel)_\w+)"
    r"|torch\._utils\._rebuild_(tensor(_v[23])?|parameter(_with_state)?|qtensor|sparse_tensor|nested_tensor"
    r"|meta_tensor_no_storage|wrapper_subclass|device_tensor_from_(cpu_tensor|numpy))"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.nn\.parameter\.Parameter|torch\.storage\.(Typed|Untyped)Storage"
    r"|torch\.serialization\._get_layout"
)
_NUMPY = re.compile(
    r"numpy\.(ndarray|dtype)|numpy\.dtypes\.\w+DType|numpy\.(_core|core)\.(multiarray\.(_reconstruct|scalar)"
    r"|numeric\._frombuffer)"
)
_OTHERS = {
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
_DCP = "torch.distributed.checkpoint"
_METADATA = {
    f"{_DCP}.metadata.{name}"
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {f"{_DCP}.filesystem._StorageInfo", "pathlib.PosixPath", "pathlib._local.PosixPath"}


class AllowedNames:
    """Refuses names of functions and classes that a loader would refuse.

    Args:
        also: further names, such as the names that a script has allowed with `torch.serialization.add_safe_globals`.
    """

    def __init__(self, also: Collection[str] = ()) -> None:
        self._also = also

    def check(self, module_name: str, global_name: str) -> None:
        """Raise CheckpointError for a name that a file of `torch.save` must not have."""
        name = f"{module_name}.{global_name}"
        if not (_TORCH.fullmatch(name) or _NUMPY.fullmatch(name) or name in _OTHERS or name in self._also):
            raise CheckpointError(f"it refers to {printable(name)}, so loading the file could run code")

    def check_in_metadata(self, module_name: str, global_name: str) -> None:
        """Raise CheckpointError for a name that DCP's `.metadata` must not have."""
        if f"{module_name}.{global_name}" not in _METADATA:
            self.check(module_name, global_name)
