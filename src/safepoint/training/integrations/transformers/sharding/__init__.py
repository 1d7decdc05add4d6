"""How the Trainer's ranks share a model, and how a checkpoint or a final model is made of the shares."""
