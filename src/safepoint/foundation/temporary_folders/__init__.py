"""Temporary folders: where they are made (`places`), and how those of killed programs are removed (`abandoned`)."""
