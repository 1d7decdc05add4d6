"""Files, their owners, locks and leases in a folder that other users may write to."""
