"""Pages and security of the dashboard, without a browser."""
