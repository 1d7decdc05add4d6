"""What a checkpoint is: manifest, commit, catalog, verification, retention.

A checkpoint is a folder `checkpoint-<step>` with the files of the training framework and one manifest that
names each of them. It is absent or complete: the manifest is written last and the folder gets its name when
everything in it is durable (docs/checkpoint-format.md).
"""
