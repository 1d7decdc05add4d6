"""Work that may hang, such as a write to a folder on a network, where nobody can afford to wait for it."""

import threading
from collections.abc import Callable


def do_within(work: Callable[[], object], limit_s: float) -> bool:
    """Do `work` on a thread of its own and wait for it `limit_s` seconds at most; what it raises is dropped.

    Returns:
        Whether it was done in time; otherwise it goes on beside whatever follows.
    """
    is_done = threading.Event()

    def run() -> None:
        try:
            work()
        except Exception:  # noqa: BLE001  whoever calls this reports, and has nobody to report to
            return
        finally:
            is_done.set()

    threading.Thread(target=run, name="holdfast-bounded", daemon=True).start()
    return is_done.wait(limit_s)


__all__ = ["do_within"]
