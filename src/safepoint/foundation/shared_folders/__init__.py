"""Files, locks and leases in a folder that other users may write to."""
