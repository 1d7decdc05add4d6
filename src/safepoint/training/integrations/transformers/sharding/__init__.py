"""How the Trainer's ranks divide a model, and how a checkpoint or a final model is made of their parts."""
