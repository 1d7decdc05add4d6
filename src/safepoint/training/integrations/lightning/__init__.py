"""Lightning's Trainer.

callback         `SafepointCallback`, which a script passes to its Trainer
lightning_parts  the state, saved and loaded by Lightning itself
lightning_data   the position in the data
"""
