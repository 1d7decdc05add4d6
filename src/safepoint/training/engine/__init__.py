"""What every training loop under Safepoint uses, whatever its framework: vote, save, leave.

loop              the protocol that a framework's loop implements
boundary          what happens between two steps and at the end; start reading here
agreement         the votes of the ranks, and whether a step can still be finished
deadline          gives up a step that would end too late
saves             chooses between the next two
snapshots         saves through the keeper
synchronous_save  saves without it
scratch           the folder in which a framework's save routine runs
save_clock        when a periodic checkpoint is due
setup             what all of these know of the training
final_model_save  the finished model, from the ranks into the object store
streams           large files of the finished model, which their writer receives from all ranks
"""
