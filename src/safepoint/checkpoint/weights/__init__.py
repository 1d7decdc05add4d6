"""Finds the weights in a checkpoint, without loading the checkpoint and without running its code.

stored_weight               a weight as ranges of files, and the files that `from_pretrained` reads
budget                      limits what the reading of one checkpoint may cost
torch_file                  reads files of `torch.save`; for a tensor, only the position of its bytes
parts                       whether the listed parts of a tensor make the whole tensor
state_dict_weights          where weights are in one file of torch.save
dcp_weights, zero_weights   where weights are, in the layouts of torch.distributed.checkpoint and DeepSpeed
"""
