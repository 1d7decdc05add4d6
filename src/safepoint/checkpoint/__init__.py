"""Checkpoints: what they are, how they are committed, and where they are stored.

A checkpoint is a folder `checkpoint-<step>` with the files of the training framework and one manifest that
names each of these files. Readers see the whole checkpoint or none: the manifest is written last, and the folder gets
its name when everything in it is durable (docs/checkpoint-format.md).

commit   the action after which files count as a checkpoint
format   manifest, digests, verification
local    the output folder, the ranks' working folders, retention and pruning
remote   object stores: publish, fetch, and the uploader's process
weights  where the weights are in a checkpoint of any layout
pickles  reads the pickles of a checkpoint within limits

foreign  checkpoints that other programs wrote
tools    list, copy, export, compare, repair, adopt
"""
