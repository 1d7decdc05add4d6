"""Lightning's Trainer.

callback         what a script gives its Trainer: it tells where a step ends
parts            the state, by Lightning's own saving and loading
checkpoint_io    how Lightning's files are written
feed             the place in the data
"""
