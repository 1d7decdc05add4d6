"""Every store keeps the promises of `safepoint.storage.store.Store`."""
