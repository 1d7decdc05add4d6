"""Lightning's Trainer.

callback         `SafepointCallback`, which a script gives to its Trainer
parts            the state, saved and loaded by Lightning itself
checkpoint_io    how Lightning's files are written and read
lightning_data   the position in the data
"""
