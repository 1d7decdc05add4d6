"""The training process of a rank, with vote, saves and resume; and the launcher of the ranks.

`python -m safepoint.training SCRIPT` is one rank (`rank`). This module imports nothing heavy, because the signal
handlers must be installed before torch is imported.

launcher      starts the ranks of one node, relays signals, returns one exit code
rank          one rank: signal handlers, hooks, the user's program, its exit code
integrations  transformers, lightning, deepspeed
plain         hand-written loops: `safepoint.session`
engine        what all loops share: vote, save, leave
start         claims the folders, chooses a checkpoint, copies it to every node
collective    the ranks' process group and the vote
context       one rank's settings, connections, progress and end
state         random numbers, strategies, the model below adapters
outcome       how the ranks ended
"""
