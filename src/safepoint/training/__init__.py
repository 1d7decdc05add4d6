"""The training process of a rank, with its votes, saves and resume; and the launcher that starts the ranks.

`python -m safepoint.training SCRIPT` runs SCRIPT as one rank (module `rank`). This package imports nothing heavy by
itself, because a rank must install its signal handlers before it imports torch.

launcher      starts the ranks of one node, relays signals, returns one exit code
rendezvous    the store where the ranks of a job find each other, closed to strangers
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
