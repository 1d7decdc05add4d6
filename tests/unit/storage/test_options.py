"""How to reach an object store, from the variables that other tools read."""

from pathlib import Path

import pytest

from safepoint.storage.options import StorageOptions


def test_the_usual_variables_are_read() -> None:
    """Endpoint by its three names in order, a bare host means https, spaces and a last slash do not matter."""
    common = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "eu-1"}
    options = StorageOptions.from_environment({**common, "AWS_S3_ENDPOINT": " s3.example.com/ "})
    assert (options.endpoint, options.region) == ("https://s3.example.com", "eu-1")
    assert (options.access_key_id, options.secret_access_key) == ("key", "secret")
    names = ("AWS_ENDPOINT_URL", "AWS_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3")
    environ = dict(common)
    for name in names:
        environ[name] = f"http://{name.lower().replace('_', '-')}"
        assert StorageOptions.from_environment(environ).endpoint == environ[name]
    assert StorageOptions.from_environment({}) == StorageOptions()
    assert StorageOptions().access_key_id is None


@pytest.mark.parametrize(
    "environ",
    [
        {"AWS_ENDPOINT_URL": "ftp://host"},
        {"AWS_CA_BUNDLE": "/no/such/file.pem"},
        {"SAFEPOINT_VERIFY_TLS": "perhaps"},
    ],
)
def test_what_cannot_be_meant_is_named(environ: dict[str, str]) -> None:
    """With the value."""
    with pytest.raises(ValueError, match=r"must|is not a file") as error:
        StorageOptions.from_environment(environ)
    assert next(iter(environ.values())) in str(error.value)


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    """Not in `repr`, which ends up in logs and tracebacks."""
    options = StorageOptions(access_key_id="known", secret_access_key="hidden-1", session_token="hidden-2")
    assert "hidden" not in repr(options)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_key_pair_is_refused(name: str) -> None:
    """The library would look for the other half elsewhere, for minutes."""
    with pytest.raises(ValueError, match="set both of them or neither"):
        StorageOptions.from_environment({name: "x"})
