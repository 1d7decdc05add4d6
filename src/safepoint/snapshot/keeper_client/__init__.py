"""A rank's side of the keeper.

process      starts the keeper's process, and replaces one that died
client       the connection to the keeper
arena        the rank's blocks of shared memory
snapshotter  takes snapshots: places images in the arena, has them staged, hands them to the keeper
"""
