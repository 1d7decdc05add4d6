"""What the ranks do together: their process group, the vote, and waits that fail on all ranks at once."""
