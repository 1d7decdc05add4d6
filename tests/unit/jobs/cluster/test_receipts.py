"""Tests of safepoint.jobs.cluster.records.receipts: what a pod or an annotation says is data."""

import json
from typing import Any

import pytest

from safepoint.jobs.cluster.records.receipts import read_receipt, receipt_of
from safepoint.jobs.model.receipts import Receipt

ANSWER = {"step": 12, "name": "checkpoint-12", "digest": "a1", "size_bytes": 5, "is_read": True}
RECEIPT = Receipt(step=12, checkpoint="pvc://c/run/checkpoint-12", digest="a1", is_read=True, was_requested=True)


def test_the_answer_of_a_pod_becomes_a_receipt_with_the_location() -> None:
    assert receipt_of(ANSWER, output="pvc://c/run/", was_requested=True) == RECEIPT
    assert "step 12 was saved in pvc://c/run/checkpoint-12 (digest a1)" in RECEIPT.text
    at_end = receipt_of({**ANSWER, "is_read": False}, output=None, was_requested=False, reason="it was Starting")
    assert at_end is not None
    assert "at SIGTERM because it was Starting; only the names and sizes of its files were compared" in at_end.text


@pytest.mark.parametrize("answer", [None, [], "12", {}, {**ANSWER, "step": "12"}, {**ANSWER, "digest": None}])
def test_an_answer_that_is_none(answer: Any) -> None:
    assert receipt_of(answer, output="pvc://c/run", was_requested=True) is None


def test_an_annotation_is_read_as_it_was_written() -> None:
    assert read_receipt(json.dumps(RECEIPT.to_document())) == RECEIPT


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "[]", "5", "{}", "nonsense", "[" * 10_000, "x" * 20_000),
        json.dumps({**RECEIPT.to_document(), "step": True}),
        json.dumps({**RECEIPT.to_document(), "digest": 5}),
        json.dumps({**RECEIPT.to_document(), "more": 1}),
    ],
)
def test_an_annotation_that_someone_changed_is_ignored(text: str | None) -> None:
    assert read_receipt(text) is None
