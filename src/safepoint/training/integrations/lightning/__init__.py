"""Lightning's Trainer.

callback         `SafepointCallback`, which a script passes to its Trainer
lightning_parts  the state, saved and loaded by Lightning itself
callback_states  checks the states of callbacks
checkpoint_files the files of ModelCheckpoint: their paths, links, and how they are deleted
loop_counts      checks the counts of the loops
lightning_data   the position in the data
"""
