"""moto's server with conditions as in S3: of several requests with one condition, one succeeds.

    python -P moto_process.py -H HOST -p PORT

moto serves each request on a thread of its own, and looks at a condition before it acts, so two could pass it.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

_one_at_a_time = threading.RLock()


def _alone(action: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(action)
    def act(*args: Any, **kwargs: Any) -> Any:
        with _one_at_a_time:
            return action(*args, **kwargs)

    return act


if __name__ == "__main__":
    for name in ("put_object", "copy_object", "delete_object", "_key_response_post"):
        setattr(S3Response, name, _alone(getattr(S3Response, name)))
    main()
