"""What every training loop under Safepoint uses, whatever its framework: the vote's outcome, saves."""
