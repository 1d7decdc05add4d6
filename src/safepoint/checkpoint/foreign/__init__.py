"""Checkpoints without a manifest, which another program wrote (docs/adr/0023): are they whole, and what is in them?

examine   checks a folder or a prefix as far as its format allows; start reading here
layout    which files the Trainer needs, and what their names state
contents  checks one file: safetensors, a file of torch.save, an index, a folder of DCP
names     which classes and functions the pickles of a checkpoint may name
describe  computes the manifest that a checkpoint would have
"""
