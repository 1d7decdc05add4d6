"""What the objects of a job record besides its state: its progress, and what its suspension saved (the receipt)."""
