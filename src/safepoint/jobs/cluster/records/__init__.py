"""What the objects of a job record besides its state: its progress, the receipt of its suspension."""
