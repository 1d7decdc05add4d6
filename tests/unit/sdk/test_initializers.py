"""Tests of safepoint.sdk.initializers, with Kubeflow's classes."""

from safepoint.sdk.initializers import initializer_of
from safepoint.sdk.upstream import types


def test_kubeflows_classes_become_parts_of_the_trainjob() -> None:
    found, secrets = initializer_of(
        types.Initializer(
            dataset=types.S3DatasetInitializer(
                storage_uri="s3://bucket/data", region="here", access_key_id="key", secret_access_key="sesame"
            ),
            model=types.HuggingFaceModelInitializer(storage_uri="hf://org/model", access_token="hf_sesame"),
        )
    )
    assert found["dataset"] == {"storageUri": "s3://bucket/data", "env": [{"name": "REGION", "value": "here"}]}
    assert found["model"]["storageUri"] == "hf://org/model"
    assert [entry["name"] for entry in found["model"]["env"]] == ["IGNORE_PATTERNS"]
    assert "sesame" not in str(found)
    assert secrets == {
        "dataset": {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "sesame"},
        "model": {"ACCESS_TOKEN": "hf_sesame"},
    }


def test_a_cache_has_no_secrets() -> None:
    cache = types.DataCacheInitializer(storage_uri="cache://schema/table", metadata_loc="s3://m", num_data_nodes=2)
    found, secrets = initializer_of(types.Initializer(dataset=cache))
    assert found["dataset"]["env"][0] == {"name": "CLUSTER_SIZE", "value": "3"}
    assert secrets == {}


def test_nothing_is_nothing() -> None:
    assert initializer_of(None) == initializer_of(types.Initializer()) == ({}, {})
