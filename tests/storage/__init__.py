"""Every store implements the contract of `safepoint.storage.store.Store`."""
