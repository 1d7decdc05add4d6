"""What every training loop under Holdfast is made of, whatever framework it belongs to: the vote's outcome, saves."""
