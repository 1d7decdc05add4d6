"""Temporary folders: where they are made (`places`), and how folders of killed programs are removed (`abandoned`)."""
