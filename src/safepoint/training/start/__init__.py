"""How an attempt begins: folders are claimed, a checkpoint is chosen, verified, and copied to every node.

start     the order of all of it; start reading here
claim     one writer for the folder, one for the object store
folders   which ranks use which output folder
choose    which checkpoint
copies    what each folder has of a checkpoint, and the copy that a run resumes from
transfer  copies it into every folder, from the other nodes and the store
"""
