"""What a rank and its keeper send to each other."""
