"""Events about the checkpoint that a start of a run resumes from, as typed records (docs/progress.md)."""

from safepoint.foundation.events.stream import Event


class ResumedFromOtherRun(Event, is_warning=True):
    """The run resumes from a checkpoint of another run than the one that used the output location last."""

    step: int
    path: str
    run_id: str
    last_run_id: str

    def _sentence(self) -> str:
        return (
            f"{self.path} belongs to run {self.run_id[:8]}, but run {self.last_run_id[:8]} used this location last. "
            f"The training continues run {self.run_id[:8]}, whose checkpoint is the newest valid one. If that is "
            "not intended, stop the run, move this checkpoint away, and find out who has put it there"
        )
