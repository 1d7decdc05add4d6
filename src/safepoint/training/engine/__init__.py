"""What the training loops of all frameworks share: vote, save, end.

loop              the protocol that a framework's loop implements
boundary          what happens between two steps and at the end; start reading here
agreement         the votes of the ranks, and whether a step can still be finished
deadline          gives up a step that would end too late
saves             chooses between `snapshots` and `synchronous_save`
snapshots         saves through the keeper, the process of each node that writes snapshots to disk
synchronous_save  saves without the keeper
scratch           the folder in which a framework's save routine runs
save_clock        when a periodic checkpoint is due
setup             the ranks, the loop, the folder and the start of one training
final_model_save  saves the finished model in the object store
streams           the large files of the finished model, whose bytes the first rank receives from all ranks
"""
