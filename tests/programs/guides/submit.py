"""What a reader of Red Hat's guides does with the trainer of `guide.py`: submits it, pauses the job and resumes it.

Prints as JSON what the client says about the job.
"""

import builtins
import json
import time

from training import train_fn

from safepoint import LocalConfig, TrainerClient

builtins.train_fn = train_fn  # the documentation does not say where it is from

from guide import trainer  # noqa: E402

client = TrainerClient(LocalConfig(pvc={"my-checkpoints-pvc": "claim"}))
name = client.train(trainer=trainer)
while True:
    job = client.get_job(name)
    if job.progress is not None and job.progress.step >= 8:
        break
    if job.status in {"Failed", "Complete"}:
        raise SystemExit("\n".join([str(job), *client.get_job_logs(name)]))
    time.sleep(0.1)
suspended = client.suspend_job(name)
client.resume_job(name)
job = client.wait_for_job_status(name, {"Complete", "Failed"}, timeout=1200)
print("\n".join(client.get_job_logs(name)))
resumed = [event.message for event in client.get_job_events(name) if event.reason == "Resumed"]
seen = {
    "status": [suspended.status, job.status],
    "saved_step": suspended.safe_step,
    "is_resumed": any(f"step {suspended.safe_step}," in message for message in resumed),
    "world_size": job.progress.world_size,
    "steps": [job.progress.step, job.progress.max_steps],
    "checkpoints": [one.path for one in client.list_checkpoints(name) if one.is_complete],
}
print(json.dumps(seen))
client.delete_job(name)
