"""How an attempt begins: folders are claimed, a checkpoint is chosen, verified, and copied to every node.

start        the order of these steps; start reading here
claim        makes this run the only writer of the folder and of the object store
folders      which ranks use which output folder
choose       which checkpoint the run resumes from
candidate    a checkpoint that may be chosen, and which of several is tried first
first_start  which start of a job is the first one
contents     what is checked in a complete checkpoint before it is chosen
foreign      the checkpoints of other programs
copies       what each folder has of a checkpoint, and the copy that a run resumes from
transfer     copies the chosen checkpoint into every folder, from the other nodes and the store
"""
