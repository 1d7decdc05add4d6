"""The weights in a checkpoint, found without loading it and without running anything of it.

inert_pickle, torch_file   what `torch.save` has written, as plain values and places of bytes
weight                     a weight as stretches of files
state_dict_weights,
dcp_weights, zero_weights  where weights are, in each layout
gathering                  from stretches to the files that `from_pretrained` reads
"""
