"""The keeper, the process of each node that writes snapshots to disk: `python -m safepoint.snapshot.keeper PLAN`.

The process imports no torch. For each rank, one thread receives the rank's messages. One thread writes checkpoints.
The main thread waits. The keeper ends when its owner (usually the process that started it, see `KeeperPlan`) has
ended, no rank is connected, and nothing is left to write. It ignores the signals that end ranks.

__main__           the process: accepts connections, and ends
message_handler    does what a rank's message requests
keeper_state       what the threads share, behind one condition: ranks, memory, snapshots, the folder
snapshot_registry  which snapshots there are, what is written next, which memory is free
writer             the thread that makes checkpoints of snapshots
persist            from a snapshot to a committed checkpoint, alone or with the keepers of other nodes
rescue             makes the newest snapshot durable when ranks have failed or must end, on all nodes
earlier_snapshot   the newest snapshot of the ranks before a restart, for the restarted ranks
held_folder        the output folder with its lock, and the events and log lines
"""
