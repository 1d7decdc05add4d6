"""What a notebook shows of jobs and checkpoints: HTML for a cell, and short texts where there is no HTML."""
