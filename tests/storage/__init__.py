"""Every store keeps the promises of `holdfast.storage.store.Store`."""
