"""The training process of a rank (votes, saves, resume), and the launcher that starts the ranks.

`python -m safepoint.training SCRIPT` runs SCRIPT as one rank (module `rank`). Importing this package loads no heavy
library, because a rank must install its signal handlers before it imports torch.

launcher        starts the ranks of one node, relays signals, returns one exit code
rendezvous      the store where the ranks of a job find each other; other programs cannot use it
rank_processes  how ranks are created, and how they end
rank            one rank: signal handlers, hooks, the user's program, its exit code
program         finds and runs the user's program
integrations    transformers, lightning, deepspeed
plain           hand-written loops: `safepoint.session`
engine          what all loops share: vote, save, end
start           claims the folders, chooses a checkpoint, copies it to every node
collective      the ranks' process group and the vote
context         one rank's settings, signal handlers, connections, progress and end
state           random numbers, strategies, the base model of adapters
outcome         how the ranks ended, and the exit code of a node
compatibility   what differs between the releases of torch, Transformers, Accelerate and PEFT
"""
