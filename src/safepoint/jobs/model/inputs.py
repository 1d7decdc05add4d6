"""The data set and the model that a job of this machine needs before its ranks start.

Promises: an `Input` contains no access key and no token, because the history stores it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from safepoint.errors import UsageError
from safepoint.foundation.field_types import TEXT, VARIABLES, Kind, check_fields, texts

KINDS = ("dataset", "model")
HUB, STORE = "hf://", "s3://"
_TEXTS = Kind(words="a tuple of strings", fits=lambda value: isinstance(value, tuple) and texts().fits(value))
_FIELDS = {"kind": TEXT, "source": TEXT, "target": TEXT, "ignore": _TEXTS, "env": VARIABLES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A data set or a model to fetch.

    Args:
        kind: `dataset` or `model`.
        source: `hf://<owner>/<repository>`, `s3://<bucket>/<prefix>`, or the absolute path of a folder.
        target: the path at which the ranks find it, such as `/workspace/dataset`.
        ignore: patterns of the files that are not fetched, as for `fnmatch`. They have no effect if the source
            is a folder.
        env: variables for the fetch, such as the address of the server.
    """

    kind: str
    source: str
    target: str
    ignore: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        try:
            check_fields(self, _FIELDS)
        except ValueError as error:
            raise UsageError(f"an input of the job: {error}") from error
        if self.kind not in KINDS:
            raise UsageError(f"an input of the job is a {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if not self.source.startswith((HUB, STORE, "/")):
            raise UsageError(
                f"the {self.kind} {self.source!r} is neither on the Hugging Face Hub, nor in S3, nor an absolute path"
            )

    @property
    def step(self) -> str:
        """The name of the step of the job that fetches it, as in Kubeflow."""
        return f"{self.kind}-initializer"

    @property
    def log(self) -> str:
        """The name of the file with the output of the step."""
        return f"{self.step}.log"

    @property
    def keys_file(self) -> str:
        """The name of the file with the keys for the fetch, in the job's folder until the fetch is complete."""
        return f"{self.step}.keys.json"

    def to_record(self) -> dict[str, Any]:
        """The mapping that `from_record` reads."""
        record = {item.name: getattr(self, item.name) for item in fields(self)}
        return record | {"ignore": list(self.ignore), "env": dict(self.env)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Input":
        """Read a mapping of any release. Fields that this release does not know are ignored."""
        values = {item.name: record[item.name] for item in fields(cls) if item.name in record}
        ignore = values.get("ignore", ())
        # A string is left as it is, so that the check refuses it. tuple() would split it into letters.
        values["ignore"] = tuple(cast("list[str]", ignore)) if isinstance(ignore, list) else ignore
        return cls(**values)
