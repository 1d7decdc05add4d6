"""Lightning's Trainer.

callback          `SafepointCallback`, which a script passes to its Trainer
lightning_parts   the state, saved and loaded by Lightning itself
callback_states   checks the states of callbacks
averaged_weights  lets StochasticWeightAveraging continue after a resume
checkpoint_files  the paths in the states of ModelCheckpoint
checkpoint_links  refuses links where callbacks write and delete checkpoints
loop_counts       checks the counts of the loops
lightning_data    the position in the data
"""
