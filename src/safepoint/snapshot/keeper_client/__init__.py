"""A rank's side of the connection to the keeper, the process of each node that writes snapshots to disk.

process      starts the keeper's process, and replaces one that died
client       the connection to the keeper
arena        the rank's blocks of shared memory
snapshotter  takes snapshots: places the images of files in the arena, starts their copy, announces
             them to the keeper
"""
