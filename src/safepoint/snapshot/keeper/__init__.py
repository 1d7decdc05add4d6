"""The keeper's process: `python -m safepoint.snapshot.keeper PLAN`. It imports no torch.

One thread listens to each rank, one writes, the main thread watches over the end: the keeper goes when its owner is
gone, no rank is connected, and nothing is left to write. It ignores the signals that end ranks.

__main__    the process: it takes connections, and lives as long as it is needed
shared_state  what the threads share, behind one condition: the starts of the ranks, the folder, who waits for what
folder      the output folder that is held
message_handler what a rank says, and what follows from it
writer      the thread that makes checkpoints of snapshots
rescue      what is made durable when ranks are gone or must go, together with other nodes
recall      what an earlier start has left, for the ranks that begin anew
reporting   the console and the streams of events
"""
